"""People, organizations and keys, made by the same operations as in production."""

import datetime
from itertools import count

from django.db import transaction
from django.http import HttpResponse
from django.test import Client

from apps.accounts.login.addresses import mark_verified
from apps.accounts.login.key_operations import IssuedKey, issue_key, issue_member_token
from apps.accounts.members.projects import create_project, set_project_member
from apps.accounts.members.service_accounts import create_service_account
from apps.accounts.models import Membership, Organization, Project, User
from apps.accounts.operations import create_organization
from apps.accounts.queries import NO_LIMITS, KeyLimits
from apps.accounts.roles import SCOPES
from apps.core.database.clock import db_now

PASSWORD = "correct-horse-battery"
# Scopes of a key that sees no private project but its own.
SCOPED = frozenset(SCOPES) - {"organization.manage", "member.manage", "audit.read", "webhook.manage", "adapter.delete"}
_numbers = count(1)


def make_user(name: str = "somebody", *, is_operator: bool = False, is_verified: bool = True) -> User:
    email = f"{name}-{next(_numbers)}@example.com"
    user = User.objects.create_user(email, PASSWORD, name=name.capitalize(), is_operator=is_operator)
    if is_verified:
        mark_verified(user=user)
    return user


def make_organization(name: str = "Acme", *, owner: User | None = None) -> Organization:
    with transaction.atomic():
        return create_organization(name=name, owner=owner or make_user("owner"), now=db_now())


def make_member(organization: Organization, role: str, name: str | None = None) -> User:
    user = make_user(name or role)
    Membership.objects.create(organization=organization, user=user, role=role)
    return user


def make_service_account(organization: Organization, by: User, *, role: str = "member", name: str = "ci") -> Membership:
    return create_service_account(organization=organization, name=name, role=role, by=by, now=db_now())


def make_member_token(organization: Organization, user: User, *, name: str = "Playground") -> IssuedKey:
    membership = Membership.objects.get(organization=organization, user=user)
    return issue_member_token(membership=membership, now=db_now(), name=name)


def make_key(
    organization: Organization,
    by: User,
    *,
    scopes: frozenset[str] = frozenset(SCOPES),
    expires_at: datetime.datetime | None = None,
    limits: KeyLimits = NO_LIMITS,
) -> IssuedKey:
    return issue_key(
        organization=organization, name="test", scopes=scopes, by=by, expires_at=expires_at, now=db_now(), limits=limits
    )


def make_project_key(project: Project, by: User) -> IssuedKey:
    return issue_key(
        organization=project.organization, name="test", scopes=SCOPED, by=by, expires_at=None, now=db_now(),
        project_id=project.pk,
    )  # fmt: skip


def give_project_role(project: Project, by: User, person: User, role: str) -> None:
    membership = Membership.objects.get(organization=project.organization, user=person).pk
    set_project_member(
        organization=project.organization, project_id=project.pk, membership_id=membership, role=role, by=by,
        now=db_now(),
    )  # fmt: skip


def make_private_project(organization: Organization, by: User, *members: User, name: str = "Secret") -> Project:
    project = create_project(organization=organization, name=name, is_private=True, by=by, now=db_now())
    for member in members:
        give_project_role(project, by, member, "member")
    return project


def sign_up(client: Client, **fields: str) -> HttpResponse:
    """Return the answer to Dana's sign-up form, with other values in `fields`."""
    form = {"email": "dana@example.com", "password1": PASSWORD, "name": "Dana", "organization": "Dana Labs"}
    return client.post("/accounts/signup/", form | fields)
