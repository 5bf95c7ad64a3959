"""The private projects that the present request sees. Its queries leave out the rows of all others."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from django.db.models import Model, QuerySet

from apps.accounts.models import Membership, Project
from apps.accounts.roles import Permission, has_permission

Row = TypeVar("Row", bound=Model)


@dataclass(frozen=True)
class Sight:
    """The party whose rights decide what a request sees: a membership, or a key, which is in one project."""

    membership_id: str = ""
    project_id: str = ""


_sight: ContextVar[Sight | None] = ContextVar("sight", default=None)


def sight_of_member(membership: Membership) -> Sight | None:
    """Return the sight of a member; None if they see everything, as an owner does."""
    if has_permission(membership.role, Permission.ORGANIZATION_MANAGE):
        return None
    return Sight(membership_id=membership.pk)


def sight_of_key(*, project_id: str, scopes: Collection[str]) -> Sight | None:
    """Return the sight of a key; None if it sees everything, as a key that may manage the organization does."""
    return None if Permission.ORGANIZATION_MANAGE in scopes else Sight(project_id=project_id)


@contextmanager
def seeing(sight: Sight | None) -> Iterator[None]:
    """Leave out rows that `sight` does not see. With None, as in tasks and for operators, all rows are visible."""
    token = _sight.set(sight)
    try:
        yield
    finally:
        _sight.reset(token)


def visible(rows: QuerySet[Row], *, project: str = "project") -> QuerySet[Row]:
    """Return the rows without those of private projects that the request does not see.

    `project` is the path to a row's project.
    """
    sight = _sight.get()
    if sight is None:
        return rows
    private = Project.objects.filter(is_private=True).exclude(pk=sight.project_id)
    hidden = private.exclude(members__membership=sight.membership_id)
    return rows.exclude(**{f"{project}__in": hidden.values("pk")})
