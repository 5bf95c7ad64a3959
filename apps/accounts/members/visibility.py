"""The private projects that the present request sees. Its queries leave out the rows of all others."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from django.db.models import Model, QuerySet

from apps.accounts.models import ApiKey, KeyKind, Membership, Project, ProjectMember
from apps.accounts.roles import Permission, has_permission

Row = TypeVar("Row", bound=Model)


@dataclass(frozen=True)
class Sight:
    """The party whose rights decide what a request sees: a membership, or a key, which sees some private projects."""

    membership_id: str = ""
    project_ids: frozenset[str] = frozenset()


_sight: ContextVar[Sight | None] = ContextVar("sight", default=None)


def sight_of_member(membership: Membership) -> Sight | None:
    """Return the sight of a member; None if they see everything, as an owner does."""
    if has_permission(membership.role, Permission.ORGANIZATION_MANAGE):
        return None
    return Sight(membership_id=membership.pk)


def sight_of_key(*, project_id: str, scopes: Collection[str]) -> Sight | None:
    """Return what a key sees; None for everything, as a key that may manage the organization does."""
    return None if Permission.ORGANIZATION_MANAGE in scopes else Sight(project_ids=frozenset({project_id}))


def sight_of_inference(*, key_id: str) -> Sight | None:
    """Return which private projects' models a key may ask; None for all.

    A short-lived token sees what the member it acts for sees, or the key that it was made with.
    """
    key = ApiKey.objects.get(pk=key_id)
    if key.kind == KeyKind.MEMBER and key.made_with:
        key = ApiKey.objects.filter(pk=key.made_with).first() or key
    creator = Membership.objects.for_organization(key.organization_id).filter(user=key.created_by_id).first()
    manages = creator is not None and has_permission(creator.role, Permission.ORGANIZATION_MANAGE)
    if key.kind != KeyKind.MEMBER:
        return sight_of_key(project_id=key.project_id, scopes=key.scopes if manages else ())
    projects = ProjectMember.objects.filter(membership=creator).values_list("project_id", flat=True)
    return None if manages else Sight(project_ids=frozenset(projects))


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
    private = Project.objects.filter(is_private=True).exclude(pk__in=sight.project_ids)
    hidden = private.exclude(members__membership=sight.membership_id)
    return rows.exclude(**{f"{project}__in": hidden.values("pk")})
