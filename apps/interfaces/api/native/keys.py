"""API keys: list, create, change, label, rotate with an overlap, revoke."""

import datetime
from typing import Annotated, Literal, TypedDict

import msgspec
from django.db.models import Q
from django.db.models.functions import Now
from msgspec import UNSET, Meta, UnsetType
from rest_framework.request import Request

from apps.accounts import queries
from apps.accounts.login import key_operations
from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.login.key_rotation import MAX_OVERLAP
from apps.accounts.models import ApiKey, Organization
from apps.accounts.queries import KeyLimits
from apps.accounts.roles import SCOPES, Permission
from apps.billing.budget_settings import issue_key, rotate_key, set_key_labels
from apps.billing.usage.labels import labels_of_keys
from apps.core.database.clock import db_now
from apps.interfaces.api.requests.pagination import ListObject, SearchQuery, page_together, with_words_of
from apps.interfaces.api.requests.times import unix_seconds
from apps.interfaces.api.views import ApiView

Limit = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
_STATUSES = {
    "active": Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=Now())),
    "expired": Q(revoked_at=None, expires_at__lte=Now()),
    "revoked": Q(revoked_at__isnull=False),
}


class KeysQuery(SearchQuery):
    status: Literal["active", "expired", "revoked"] | None = None
    project: Annotated[str, Meta(max_length=40, description="The id of a project.")] | None = None


class CreateKey(msgspec.Struct, forbid_unknown_fields=True):
    """`expires_at` is in Unix seconds. The new key may do no more, and live no longer, than the one that makes it.

    The project and limits that you leave out, and the labels, are those of the key that makes it. Another project needs
    the scope `member.manage`.
    """

    name: Annotated[str, Meta(min_length=1, max_length=80)]
    scopes: Annotated[list[Permission], Meta(min_length=1, max_length=len(SCOPES))]
    expires_at: Annotated[int, Meta(ge=0, le=253_000_000_000)] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None
    project: Annotated[str, Meta(max_length=40)] | None = None


class ChangeKey(msgspec.Struct, forbid_unknown_fields=True):
    """What is left out stays as it is. null removes a limit, or sets that of the key that you call with."""

    name: Annotated[str, Meta(min_length=1, max_length=80)] | UnsetType = UNSET
    requests_per_minute: Limit | UnsetType | None = UNSET
    tokens_per_minute: Limit | UnsetType | None = UNSET
    concurrent_requests: Limit | UnsetType | None = UNSET


class SetLabels(msgspec.Struct, forbid_unknown_fields=True):
    """`labels` replace all labels that the key has."""

    labels: dict[str, str]


class RotateKey(msgspec.Struct, forbid_unknown_fields=True):
    """For `overlap_hours`, both keys work. 0 ends the old key at once. The key that you call with needs at least 1."""

    overlap_hours: Annotated[int, Meta(ge=0, le=MAX_OVERLAP.days * 24)] = 24


class ApiKeyObject(TypedDict):
    """`prefix` is the begin of the secret. `created_by` is the member or service account in whose name the key acts.
    `project` is the one of all that is created with it. What its requests cost is charged to its `labels`.

    `issued_by` is set for keys of service accounts: who created the key, and so knows it.
    """

    object: Literal["api_key"]
    id: str
    project: str
    name: str
    prefix: str
    status: str
    scopes: list[str]
    created_by: str
    issued_by: str | None
    created_at: int
    last_used_at: int | None
    expires_at: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    labels: dict[str, str]


class IssuedKeyObject(ApiKeyObject):
    """A new key. `secret` is shown only here."""

    secret: str


class KeyList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.KEY_MANAGE}
    examples = {"POST": {"name": "nightly evaluation", "scopes": ["inference"], "requests_per_minute": 60}}

    def get(self, request: Request, query: KeysQuery) -> ListObject[ApiKeyObject]:
        """List API keys, newest first. `q` searches name, prefix and creator."""
        keys = queries.list_keys(organization=self.organization)
        rows = keys.filter(_STATUSES[query.status]) if query.status else keys
        rows = rows.filter(project=query.project) if query.project else rows
        now = db_now()
        fields = ("name", "prefix", "created_by__name", "created_by__email")
        found = with_words_of(query, rows, fields=fields)
        return page_together(query, found, lambda keys: key_objects(self.organization, keys, now), places=keys)

    def post(self, request: Request, body: CreateKey) -> IssuedKeyObject:
        """Create a key in the name of this key's creator. Its secret is in this answer only.

        A key with a budget of its own cannot create keys. One whose project has a budget creates keys in that project
        only.
        """
        return create_key(self, body)


class KeyDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.KEY_MANAGE, "DELETE": Permission.KEY_MANAGE}
    moving = ("last_used_at",)
    examples = {"POST": {"name": "nightly evaluation", "requests_per_minute": 120}}

    def get(self, request: Request, key_id: str) -> ApiKeyObject:
        """Return a key, without its secret."""
        return key_object(queries.get_key(organization=self.organization, id=key_id), db_now())

    def post(self, request: Request, key_id: str, body: ChangeKey) -> ApiKeyObject:
        """Rename a key, or change its limits. They apply to its next requests.

        No limit may be above that of the key that you call with. To change another key of the same creator, your key
        needs all its scopes. For keys of others it needs `member.manage`.
        """
        now = db_now()
        sent = {field: getattr(body, field) for field in _LIMITS}
        changed = key_operations.change_key(
            organization=self.organization,
            key_id=key_id,
            name=None if body.name is UNSET else body.name,
            limits={field: value for field, value in sent.items() if value is not UNSET},
            by=self.creator,
            now=now,
            identity=self.identity,
        )
        return key_object(changed, now)

    def delete(self, request: Request, key_id: str) -> ApiKeyObject:
        """Revoke a key. It never works again, and stays in the list.

        The keys that were created or rotated with it are revoked as well, except the key that you call with. To revoke
        another key of the same creator, your key needs all its scopes. For keys of others it needs `member.manage`.
        """
        now = db_now()
        revoked = key_operations.revoke_key(
            organization=self.organization, key_id=key_id, by=self.creator, now=now, identity=self.identity
        )
        return key_object(revoked, now)


class KeyLabels(ApiView):
    required_scope = {"PUT": Permission.ORGANIZATION_MANAGE}
    examples = {"PUT": {"labels": {"team": "search"}}}

    def put(self, request: Request, key_id: str, body: SetLabels) -> ApiKeyObject:
        """Replace the labels of a key. They apply to its next requests, and to budgets of labels."""
        key = queries.get_key(organization=self.organization, id=key_id)
        set_key_labels(organization=self.organization, key_id=key.pk, labels=body.labels, by=self.actor)
        return key_object(key, db_now())


class KeyRotation(ApiView):
    required_scope = {"POST": Permission.KEY_MANAGE}
    examples = {"POST": {"overlap_hours": 24}}

    def post(self, request: Request, key_id: str, body: RotateKey) -> IssuedKeyObject:
        """Replace a key by a new one with the same project, scopes, limits, labels and budget.

        Both work for `overlap_hours`. A key is rotated once; then rotate the key that replaced it.

        Only the creator of a key may rotate it, with that key or one that may do at least as much. Keys of service
        accounts are also rotated by those who manage the account.
        """
        now = db_now()
        issued = rotate_key(
            organization=self.organization,
            key_id=key_id,
            overlap=datetime.timedelta(hours=body.overlap_hours),
            by=self.creator,
            now=now,
            identity=self.identity,
        )
        return issued_object(issued, now)


def create_key(view: ApiView, body: CreateKey, service_account_id: str = "") -> IssuedKeyObject:
    """Create the key that was asked for, in the name of the creator of the view's key or of a service account."""
    seconds, now = body.expires_at, db_now()
    expires_at = None if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    issued = issue_key(
        organization=view.organization,
        name=body.name,
        scopes=frozenset(scope.value for scope in body.scopes),
        by=view.creator,
        expires_at=expires_at,
        limits=KeyLimits(body.requests_per_minute, body.tokens_per_minute, body.concurrent_requests),
        now=now,
        identity=view.identity,
        service_account_id=service_account_id,
        project_id=body.project or "",
    )
    return issued_object(issued, now)


def issued_object(issued: IssuedKey, now: datetime.datetime) -> IssuedKeyObject:
    return {**key_object(issued.key, now), "secret": issued.secret}


def key_objects(organization: Organization, keys: list[ApiKey], now: datetime.datetime) -> list[ApiKeyObject]:
    labels = labels_of_keys(organization=organization, ids=[key.pk for key in keys])
    return [_object(key, labels.get(key.pk, {}), now) for key in keys]


def key_object(key: ApiKey, now: datetime.datetime) -> ApiKeyObject:
    return _object(key, labels_of_keys(organization=key.organization_id, ids=[key.pk]).get(key.pk, {}), now)


def _object(key: ApiKey, labels: dict[str, str], now: datetime.datetime) -> ApiKeyObject:
    return {
        "object": "api_key",
        "id": key.pk,
        "project": key.project_id,
        "name": key.name,
        "prefix": key.prefix,
        "status": key.status(now=now),
        "scopes": list(key.scopes),
        "created_by": key.created_by_id,
        "issued_by": key.issued_by_id,
        "created_at": int(key.created_at.timestamp()),
        "last_used_at": unix_seconds(key.last_used_at),
        "expires_at": unix_seconds(key.expires_at),
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "concurrent_requests": key.concurrent_requests,
        "labels": labels,
    }
