"""Service accounts and their API keys, which stay when the person who created them leaves."""

from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts import queries
from apps.accounts.members import memberships, service_accounts
from apps.accounts.models import Membership
from apps.accounts.queries import MemberKind
from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.interfaces.api.native.keys import ApiKeyObject, CreateKey, IssuedKeyObject, create_key, key_objects
from apps.interfaces.api.native.members import RoleName
from apps.interfaces.api.requests.pagination import (
    ListObject,
    PageQuery,
    SearchQuery,
    page,
    page_together,
    with_words_of,
)
from apps.interfaces.api.views import ApiView

_NEWEST_FIRST = ("-created_at", "-id")
Name = Annotated[str, Meta(min_length=1, max_length=80)]


class CreateServiceAccount(msgspec.Struct, forbid_unknown_fields=True):
    """`role` is one that your key and its creator may give: both need each of its permissions."""

    name: Name
    role: RoleName


class ChangeServiceAccount(msgspec.Struct, forbid_unknown_fields=True):
    """What is left out stays."""

    name: Name | None = None
    role: RoleName | None = None


class ServiceAccountObject(TypedDict):
    """`user` is the id under which costs are counted and by which the audit log names the account."""

    object: Literal["service_account"]
    id: str
    user: str
    name: str
    role: str
    created_at: int


class DeletedServiceAccount(TypedDict):
    id: str
    object: Literal["service_account"]
    deleted: Literal[True]


class ServiceAccountList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.MEMBER_MANAGE}
    examples = {"POST": {"name": "nightly retraining", "role": "member"}}

    def get(self, request: Request, query: SearchQuery) -> ListObject[ServiceAccountObject]:
        """List service accounts, newest first. `q` searches names."""
        rows = queries.list_service_accounts(organization=self.organization)
        found = with_words_of(query, rows, fields=("user__name",))
        return page(query, found, _object, order=_NEWEST_FIRST, places=rows)

    def post(self, request: Request, body: CreateServiceAccount) -> ServiceAccountObject:
        """Create a service account: a member that cannot sign in and gets no mail. Programs act for it with its keys.

        Owners and admins are notified.
        """
        return _object(
            service_accounts.create_service_account(
                organization=self.organization,
                name=body.name,
                role=body.role,
                by=self.creator,
                now=db_now(),
                identity=self.identity,
            )
        )


class ServiceAccountDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.MEMBER_MANAGE, "DELETE": Permission.MEMBER_MANAGE}
    examples = {"POST": {"role": "viewer"}}

    def get(self, request: Request, service_account_id: str) -> ServiceAccountObject:
        """Return a service account."""
        return _object(_get(self, service_account_id))

    def post(self, request: Request, service_account_id: str, body: ChangeServiceAccount) -> ServiceAccountObject:
        """Rename a service account, or give it another role. Its keys lose what the new role does not hold, at once."""
        organization, by, identity = self.organization, self.creator, self.identity
        if body.name is not None:
            service_accounts.rename_service_account(
                organization=organization, id=service_account_id, name=body.name, by=by, identity=identity
            )
        if body.role is not None:
            memberships.change_role(
                organization=organization,
                membership_id=service_account_id,
                role=body.role,
                by=by,
                now=db_now(),
                identity=identity,
                kind=MemberKind.SERVICE_ACCOUNT,
            )
        return _object(_get(self, service_account_id))

    def delete(self, request: Request, service_account_id: str) -> DeletedServiceAccount:
        """Remove a service account. Its keys are revoked."""
        memberships.remove_member(
            organization=self.organization,
            membership_id=service_account_id,
            by=self.creator,
            now=db_now(),
            identity=self.identity,
            kind=MemberKind.SERVICE_ACCOUNT,
        )
        return {"id": service_account_id, "object": "service_account", "deleted": True}


class ServiceAccountKeys(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.KEY_MANAGE}
    examples = {"POST": {"name": "ci", "scopes": ["inference"]}}

    def get(self, request: Request, service_account_id: str, query: PageQuery) -> ListObject[ApiKeyObject]:
        """List the keys of a service account, newest first."""
        account, now = _get(self, service_account_id), db_now()
        rows = queries.list_keys(organization=self.organization).filter(created_by=account.user_id)
        return page_together(query, rows, lambda keys: key_objects(self.organization, keys, now))

    def post(self, request: Request, service_account_id: str, body: CreateKey) -> IssuedKeyObject:
        """Create a key of a service account. Its secret is in this answer only.

        Your key needs `key.manage`, `member.manage`, and each permission of the account's role. The new key is revoked
        with your key, and ends no later.
        """
        return create_key(self, body, service_account_id)


def _get(view: ApiView, id: str) -> Membership:
    return queries.get_membership(organization=view.organization, id=id, kind=MemberKind.SERVICE_ACCOUNT)


def _object(account: Membership) -> ServiceAccountObject:
    return {
        "object": "service_account",
        "id": account.pk,
        "user": account.user_id,
        "name": account.user.name,
        "role": account.role,
        "created_at": int(account.created_at.timestamp()),
    }
