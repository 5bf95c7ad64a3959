"""Queries for people, memberships, invitations and keys."""

import dataclasses
import datetime
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from django.conf import settings
from django.db import connection
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.db.models.expressions import RawSQL
from django.utils.translation import gettext

from apps.accounts.login.api_keys import fingerprint, is_well_formed
from apps.accounts.members.visibility import visible
from apps.accounts.models import (
    ApiKey,
    Invitation,
    KeyKind,
    Membership,
    Notification,
    Organization,
    Region,
    SavedView,
    User,
    home_region,
    is_allowed,
    key_of,
)
from apps.accounts.roles import ROLES, Permission
from apps.core.errors import DomainError, NotFound, Status

_MADE_WITH = """
    WITH RECURSIVE made(id) AS (
        SELECT unnest(%s::varchar[])
        UNION SELECT child.id FROM accounts_apikey child JOIN made ON child.made_with = made.id WHERE child.id <> %s
    ) SELECT id FROM made
"""


class MemberKind(StrEnum):
    PERSON = "person"
    SERVICE_ACCOUNT = "service account"


class RegionRefused(DomainError):
    """The organization is limited to regions, and the requested resource is in another one."""

    code = "region_refused"
    status = Status.FORBIDDEN
    type = "permission_error"


class KeyIdentity(msgspec.Struct, frozen=True):
    """The identity behind a bearer key. `scopes` are those that both the key and its creator's role allow now.

    `project_id` is the project of everything created with the key.
    """

    key_id: str
    organization_id: str
    organization_slug: str
    scopes: frozenset[str]
    created_by_id: str
    kind: str
    expires_at: datetime.datetime | None
    last_used_at: datetime.datetime | None
    project_id: str


@dataclass(frozen=True)
class KeyLimits:
    """The limits of one key for inference, within its organization's limits. None: the key has no own limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


NO_LIMITS = KeyLimits()


def find_key(*, secret: str) -> KeyIdentity | None:
    """Return the identity of a key; return None if it is malformed, unknown, revoked or expired, or its creator left.

    The lookup is the SQL function `find_api_key`. It is the only way for a role bound to one tenant to read another's
    key row.
    """
    if not is_well_formed(secret):
        return None
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT key_id, organization_id, organization_slug, scopes, created_by_id, role, kind, expires_at,"
            " last_used_at, project_id FROM find_api_key(%s)",
            [fingerprint(secret)],
        )
        row = cursor.fetchone()
    return _identity(row) if row else None


def _identity(row: tuple[Any, ...]) -> KeyIdentity:
    key_id, organization_id, slug, scopes, created_by_id, role, kind, expires_at, last_used_at, project_id = row
    return KeyIdentity(
        key_id=key_id,
        organization_id=organization_id,
        organization_slug=slug,
        scopes=frozenset(scopes) & frozenset(permission.value for permission in ROLES[role].permissions),
        created_by_id=created_by_id,
        kind=kind,
        expires_at=expires_at,
        last_used_at=last_used_at,
        project_id=project_id,
    )


def get_key_limits(*, key_id: str) -> KeyLimits:
    """Return the key's own limits for inference."""
    names = [field.name for field in dataclasses.fields(KeyLimits)]
    return KeyLimits(**(ApiKey.objects.filter(pk=key_id).values(*names).first() or {}))


def get_organization(*, id: str) -> Organization:
    """Return the organization. Raises NotFound."""
    organization = Organization.objects.filter(pk=id).first()
    if organization is None:
        raise NotFound(gettext("No such organization."))
    return organization


def list_regions() -> QuerySet[Region]:
    return Region.objects.order_by("name")


def regions_of(*, organization: Organization | str) -> list[str] | None:
    """Return the regions that the organization is limited to; None for any. For a row, its loaded value is used."""
    if isinstance(organization, Organization):
        return organization.regions
    return Organization.objects.filter(pk=key_of(organization)).values_list("regions", flat=True).first()


def list_limited() -> dict[str, frozenset[str]]:
    """Return the regions of every organization that is limited to some, by its id."""
    limited = Organization.objects.exclude(regions=None).values_list("pk", "regions")
    return {organization_id: frozenset(regions or ()) for organization_id, regions in limited}


def may_store(*, regions: list[str] | None) -> bool:
    """Return whether an organization that is limited to these regions may use the one of the object store."""
    return regions is None or is_allowed(regions, home_region())


def require_home(*, organization: Organization | str) -> None:
    """Raise RegionRefused if the organization may not use the region of the object store."""
    regions = regions_of(organization=organization)
    if may_store(regions=regions):
        return
    raise RegionRefused(
        gettext("Files are stored in %(region)s here, and your organization is limited to %(regions)s.")
        % {"region": home_region(), "regions": ", ".join(regions or ())}
    )


def list_memberships_of(*, user: User) -> list[Membership]:
    """Return a person's memberships with their organizations, oldest first.

    `has_unread` of a membership says whether the person has unread notifications in the organization.
    """
    rows = Membership.objects.filter(user=user).select_related("organization", "user")
    unread = Notification.objects.filter(organization=OuterRef("organization"), user=user, read_at=None)
    return list(rows.annotate(has_unread=Exists(unread)).order_by("created_at", "id"))


def get_membership(*, organization: Organization, id: str, kind: MemberKind = MemberKind.PERSON) -> Membership:
    """Return the membership of a person or of a service account. Raises NotFound."""
    is_person = kind == MemberKind.PERSON
    rows = list_members(organization=organization) if is_person else list_service_accounts(organization=organization)
    membership = rows.filter(pk=id).first()
    if membership is None:
        raise NotFound(gettext("No such member.") if is_person else gettext("No such service account."))
    return membership


def find_membership(*, organization: Organization, user: User) -> Membership | None:
    return Membership.objects.for_organization(organization).filter(user=user).first()


def list_members(*, organization: Organization) -> QuerySet[Membership]:
    """Return the members with their people, oldest first. Service accounts are not among them."""
    rows = Membership.objects.for_organization(organization).people()
    return rows.select_related("user").order_by("created_at", "id")


def list_service_accounts(*, organization: Organization) -> QuerySet[Membership]:
    """Return the memberships of the service accounts with their users, by name."""
    rows = Membership.objects.for_organization(organization).service_accounts()
    return rows.select_related("user").order_by("user__name", "id")


def find_service_account(*, organization: Organization, user_id: str) -> Membership | None:
    return list_service_accounts(organization=organization).filter(user_id=user_id).first()


def names_of_creators(*, organization: Organization | str) -> dict[str, str]:
    """Return the names of all members under whose ids costs are counted, by id: first people, then service accounts."""
    return {each.user_id: str(each.user) for each in _creators(organization)}


def names_of_memberships(*, organization: Organization | str) -> dict[str, str]:
    """Return the names of people and service accounts by the id of their membership, people first."""
    return {each.pk: str(each.user) for each in _creators(organization)}


def _creators(organization: Organization | str) -> QuerySet[Membership]:
    rows = Membership.objects.for_organization(organization).select_related("user")
    return rows.order_by(F("user__service_account_of").asc(nulls_first=True), "created_at", "id")


def list_saved_views(*, membership: Membership, listing: str) -> QuerySet[SavedView]:
    """Return the views of one list that the member saved, by name."""
    views = SavedView.objects.for_organization(membership.organization_id)
    return views.filter(membership=membership, listing=listing).order_by("name")


def list_open_invitations(*, organization: Organization, now: datetime.datetime) -> QuerySet[Invitation]:
    """Return invitations that can still be accepted, newest first."""
    rows = Invitation.objects.for_organization(organization).still_open()
    return rows.filter(expires_at__gt=now).order_by("-created_at", "id")


def list_invitations(*, organization: Organization) -> QuerySet[Invitation]:
    """Return all invitations, also those that were accepted, withdrawn or left until they expired."""
    return Invitation.objects.for_organization(organization)


def get_invitation(*, organization: Organization, id: str) -> Invitation:
    """Return the invitation. Raises NotFound."""
    invitation = list_invitations(organization=organization).filter(pk=id).first()
    if invitation is None:
        raise NotFound(gettext("No such invitation."))
    return invitation


def list_keys(*, organization: Organization) -> QuerySet[ApiKey]:
    """Return the API keys, newest first, including revoked ones but not members' browser tokens.

    Keys of private projects that the request does not see are left out.
    """
    rows = visible(ApiKey.objects.for_organization(organization).filter(kind=KeyKind.SECRET))
    return rows.select_related("created_by", "issued_by").order_by("-created_at", "-id")


def list_keys_known_to_others(*, organization: Organization, keys: Collection[ApiKey]) -> set[str]:
    """Return the ids of those keys of service accounts whose creator may no longer manage service accounts."""
    issuers = {key.issued_by_id for key in keys if key.issued_by_id}
    if not issuers:
        return set()
    roles = [name for name, role in ROLES.items() if Permission.MEMBER_MANAGE in role.permissions]
    members = Membership.objects.for_organization(organization).filter(user__in=issuers, role__in=roles)
    members = members.filter(user__is_active=True)
    gone = issuers - set(members.values_list("user_id", flat=True))
    return {key.pk for key in keys if key.issued_by_id in gone}


def with_made(keys: QuerySet[ApiKey], *, but: str = "") -> QuerySet[ApiKey]:
    """Return the working keys among these, and those made with them, without `but` and the keys made with it."""
    made = RawSQL(_MADE_WITH, [list(keys.order_by().values_list("pk", flat=True)), but])  # noqa: S611 - a constant
    return ApiKey.objects.filter(pk__in=made, revoked_at=None)


def names_of_keys(*, organization: Organization, ids: Collection[str]) -> dict[str, str]:
    """Return the names of these API keys. An organization may have revoked any number of others."""
    return dict(list_keys(organization=organization).filter(pk__in=ids).values_list("pk", "name"))


def get_key(*, organization: Organization, id: str) -> ApiKey:
    """Return the key. Raises NotFound."""
    key = list_keys(organization=organization).filter(pk=id).first()
    if key is None:
        raise NotFound(gettext("No such API key."))
    return key


def find_actor(*, organization: Organization | str, actor: str, now: datetime.datetime) -> Membership | None:
    """Return the member behind an actor id, or the creator of a key that is usable; return None if there is none now.

    A rotated key may still act through a usable key that replaced it, unless it was revoked.
    """
    people = [actor]
    if not actor.startswith("user_"):
        keys = ApiKey.objects.for_organization(organization)
        key = keys.filter(pk=actor, revoked_at=None).first()
        first = key and (key.first_key or key.pk)
        replaced = Q(first_key=first, kind=KeyKind.SECRET)  # a judge's key shares the budget, and is no successor
        line = keys.usable(now=now).filter(Q(pk=first) | replaced) if key else keys.none()
        people = list(line.values_list("created_by_id", flat=True)[:1])
    return Membership.objects.for_organization(organization).filter(user_id__in=people).first()


def project_of_actor(*, organization: Organization | str, actor: str) -> str:
    """Return the project of a key; "" for a member, because members belong to no single project."""
    keys = ApiKey.objects.for_organization(organization).filter(pk=actor)
    return keys.values_list("project_id", flat=True).first() or ""


def name_of_actor(*, organization: Organization, actor: str) -> str:
    """Return the display name for an actor id from the organization's own rows."""
    if actor.startswith("user_"):
        user = User.objects.filter(pk=actor).first()
        return str(user) if user else gettext("a former member")
    if actor.startswith("key_"):
        key = ApiKey.objects.for_organization(organization).filter(pk=actor).first()
        return f"API key {key.name}" if key else "an API key"
    return settings.BRAND_NAME


def names_of_actors(*, organization: Organization | None, actors: set[str]) -> dict[str, str]:
    """Return the display name for each actor id. An organization does not see operators' names."""
    users = User.objects.filter(pk__in=[actor for actor in actors if actor.startswith("user_")])
    mine = set(Membership.objects.filter(organization=organization, user__in=users).values_list("user_id", flat=True))
    names = {
        user.pk: "Operator" if organization and user.is_operator and user.pk not in mine else str(user)
        for user in users
    }
    keys = ApiKey.objects.filter(pk__in=[actor for actor in actors if actor.startswith("key_")])
    if organization:
        keys = keys.for_organization(organization)
    names |= {key.pk: f"API key {key.name}" for key in keys}
    return {actor: names.get(actor, settings.BRAND_NAME if actor == "system" else actor) for actor in actors}
