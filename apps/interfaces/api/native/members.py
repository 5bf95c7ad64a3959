"""Members and invitations, and the notifications of the key's creator."""

from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts import queries
from apps.accounts.members import invitations, memberships
from apps.accounts.models import Invitation, Membership, Notification
from apps.accounts.notices.notifications import list_notifications, mark_read
from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.interfaces.api.requests.pagination import ListObject, PageQuery, SearchQuery, page, with_words_of
from apps.interfaces.api.requests.times import unix_seconds
from apps.interfaces.api.views import ApiView

RoleName = Literal["viewer", "member", "admin", "owner"]


class MembersQuery(SearchQuery):
    role: RoleName | None = None


class ChangeRole(msgspec.Struct, forbid_unknown_fields=True):
    role: RoleName


class MemberObject(TypedDict):
    """`user` is the person, under whom costs are counted."""

    object: Literal["member"]
    id: str
    user: str
    name: str
    email: str
    role: str
    joined_at: int


class DeletedMember(TypedDict):
    id: str
    object: Literal["member"]
    deleted: Literal[True]


class MemberList(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, query: MembersQuery) -> ListObject[MemberObject]:
        """List members, oldest first. `q` searches name and email."""
        members = queries.list_members(organization=self.organization)
        rows = members.filter(role=query.role) if query.role else members
        rows = with_words_of(query, rows, fields=("user__name", "user__email"))
        return page(query, rows, _member_object, order=("created_at", "id"), places=members)


class MemberDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.MEMBER_MANAGE, "DELETE": Permission.MEMBER_MANAGE}
    examples = {"POST": {"role": "viewer"}}

    def get(self, request: Request, membership_id: str) -> MemberObject:
        """Return a member."""
        return _member_object(queries.get_membership(organization=self.organization, id=membership_id))

    def post(self, request: Request, membership_id: str, body: ChangeRole) -> MemberObject:
        """Give a member another role.

        Your key needs the permissions of both roles as scopes, and its creator a role that has them. The same
        applies to removing members and to invitations.
        """
        changed = memberships.change_role(
            organization=self.organization,
            membership_id=membership_id,
            role=body.role,
            by=self.creator,
            now=db_now(),
            identity=self.identity,
        )
        return _member_object(changed)

    def delete(self, request: Request, membership_id: str) -> DeletedMember:
        """Remove a member. The API keys and open invitations of this member stop working."""
        memberships.remove_member(
            organization=self.organization,
            membership_id=membership_id,
            by=self.creator,
            now=db_now(),
            identity=self.identity,
        )
        return {"id": membership_id, "object": "member", "deleted": True}


def _member_object(member: Membership) -> MemberObject:
    return {
        "object": "member",
        "id": member.pk,
        "user": member.user_id,
        "name": member.user.name,
        "email": member.user.email,
        "role": member.role,
        "joined_at": int(member.created_at.timestamp()),
    }


class CreateInvitation(msgspec.Struct, forbid_unknown_fields=True):
    """With `only_for_address`, only an account with this verified address may accept.

    If it is left out, this is so for the roles admin and owner.
    """

    email: Annotated[str, Meta(max_length=254, pattern=r"^[^@\s]+@[^@\s]+\.[^@\s]+$")]
    role: RoleName
    only_for_address: bool | None = None


class InvitationObject(TypedDict):
    object: Literal["invitation"]
    id: str
    email: str
    role: str
    invited_by: str
    created_at: int
    expires_at: int


class DeletedInvitation(TypedDict):
    id: str
    object: Literal["invitation"]
    deleted: Literal[True]


class InvitationList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.MEMBER_MANAGE}
    examples = {"POST": {"email": "ada@example.com", "role": "member"}}

    def get(self, request: Request, query: PageQuery) -> ListObject[InvitationObject]:
        """List the invitations that can still be accepted, newest first."""
        rows = queries.list_open_invitations(organization=self.organization, now=db_now())
        return page(query, rows, _invitation_object, places=queries.list_invitations(organization=self.organization))

    def post(self, request: Request, body: CreateInvitation) -> InvitationObject:
        """Mail an invitation. A second one to the same address within a day changes the first."""
        invited = invitations.invite_member(
            organization=self.organization,
            email=body.email,
            role=body.role,
            only_for_address=body.only_for_address,
            by=self.creator,
            now=db_now(),
            identity=self.identity,
        )
        return _invitation_object(invited)


class InvitationDetail(ApiView):
    required_scope = {"DELETE": Permission.MEMBER_MANAGE}

    def delete(self, request: Request, invitation_id: str) -> DeletedInvitation:
        """Withdraw an invitation that was not accepted yet."""
        invitations.revoke_invitation(
            organization=self.organization,
            invitation_id=invitation_id,
            by=self.creator,
            now=db_now(),
            identity=self.identity,
        )
        return {"id": invitation_id, "object": "invitation", "deleted": True}


def _invitation_object(invitation: Invitation) -> InvitationObject:
    return {
        "object": "invitation",
        "id": invitation.pk,
        "email": invitation.email,
        "role": invitation.role,
        "invited_by": invitation.invited_by_id,
        "created_at": int(invitation.created_at.timestamp()),
        "expires_at": int(invitation.expires_at.timestamp()),
    }


class NotificationsQuery(PageQuery):
    kind: Literal["job", "balance", "budget", "invoice", "credit", "member", "webhook"] | None = None
    is_read: bool | None = None


class ReadNotifications(msgspec.Struct, forbid_unknown_fields=True):
    """Without `notification`, all of them are marked."""

    notification: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


class NotificationObject(TypedDict):
    """`path` is the page about it."""

    object: Literal["notification"]
    id: str
    kind: str
    title: str
    path: str
    created_at: int
    read_at: int | None


class MarkedNotifications(TypedDict):
    object: Literal["notifications.read"]
    marked: int


class NotificationList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.VIEW}
    examples = {"POST": {}}

    def get(self, request: Request, query: NotificationsQuery) -> ListObject[NotificationObject]:
        """List the notifications of the key's creator in this organization, newest first."""
        notifications = list_notifications(organization=self.organization, user=self.creator)
        rows = notifications.filter(kind=query.kind) if query.kind else notifications
        rows = rows if query.is_read is None else rows.filter(read_at__isnull=not query.is_read)
        return page(query, rows, _notification_object, places=notifications)

    def post(self, request: Request, body: ReadNotifications) -> MarkedNotifications:
        """Mark notifications of the key's creator as read."""
        marked = mark_read(
            organization=self.organization,
            user=self.creator,
            now=db_now(),
            notification_id=body.notification or "",
        )
        return {"object": "notifications.read", "marked": marked}


def _notification_object(notification: Notification) -> NotificationObject:
    return {
        "object": "notification",
        "id": notification.pk,
        "kind": notification.kind,
        "title": notification.title,
        "path": notification.path,
        "created_at": int(notification.created_at.timestamp()),
        "read_at": unix_seconds(notification.read_at),
    }
