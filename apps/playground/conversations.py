"""The newest conversations of a member, which the playground can open again."""

import datetime
import re

import msgspec
from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.models import Membership
from apps.accounts.queries import require_home
from apps.core.database.locks import lock
from apps.core.errors import DomainError, InvalidValue, NotFound, Status
from apps.playground.models import SavedConversation
from apps.playground.transcripts import PlaySettings, Transcript

MAX_CONVERSATIONS = 50
MAX_BYTES = 64 * 1024
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # as JSON writes it: an escaped backslash before it is a backslash


class TooLongToKeep(DomainError):
    """The conversation or the settings are larger than what is kept."""

    code = "too_long_to_keep"
    status = Status.TOO_LARGE


def list_conversations(*, membership: Membership) -> QuerySet[SavedConversation]:
    """Return the member's conversations without their messages, newest first."""
    rows = SavedConversation.objects.for_organization(membership.organization_id).filter(membership=membership)
    return rows.defer("transcript").order_by("-updated_at", "-id")


def get_conversation(*, membership: Membership, id: str) -> SavedConversation:
    """Return one of the member's conversations. Raises NotFound, the same for unknown and other members' ids."""
    found = list_conversations(membership=membership).defer(None).filter(pk=id).first()
    if found is None:
        raise NotFound(gettext("You have no such conversation. It may have been deleted."), param="conversation")
    return found


@transaction.atomic
def keep_conversation(
    *,
    membership: Membership,
    transcript: Transcript,
    now: datetime.datetime,
    id: str = "",
    kept_at: datetime.datetime | None = None,
) -> SavedConversation:
    """Store the conversation in place of the member's own with this id, or as a new one; delete those beyond 50.

    It becomes a new one, too, if that one was last kept at another time than `kept_at`: another page changed it.
    Raises InvalidValue, TooLongToKeep, and RegionRefused if nothing of the organization may be stored here.
    """
    require_home(organization=membership.organization_id)
    require_storable(transcript)
    if not transcript.title:
        raise InvalidValue(gettext("A conversation begins with a message. Send one first."), param="columns")
    lock(f"conversations:{membership.pk}")
    rows = list_conversations(membership=membership)
    kept = rows.filter(pk=id).first()
    if kept is None or kept.updated_at != kept_at:
        kept = SavedConversation(organization_id=membership.organization_id, membership=membership)
    kept.title, kept.transcript, kept.updated_at = transcript.title, transcript, now
    kept.save()
    rows.filter(pk__in=list(rows.values_list("pk", flat=True)[MAX_CONVERSATIONS:])).delete()
    return kept


def delete_conversations(*, membership: Membership, id: str = "") -> None:
    """Delete the member's conversation with this id, if there is one; without an id delete all of them."""
    rows = list_conversations(membership=membership)
    (rows.filter(pk=id) if id else rows).delete()


def require_storable(kept: Transcript | PlaySettings) -> None:
    """Raise TooLongToKeep above 64 KiB, and InvalidValue for characters that the database refuses."""
    encoded = msgspec.json.encode(kept)
    if len(encoded) > MAX_BYTES:
        raise TooLongToKeep(
            gettext(
                "This is too long for the history: it has %(encoded)s bytes of at most %(max_bytes)s. Clear the "
                "conversation to begin a new one."
            )
            % {"encoded": f"{len(encoded):,}", "max_bytes": f"{MAX_BYTES:,}"}
        )
    if _NUL.search(encoded):
        raise InvalidValue(gettext("A text holds a NUL character. Remove it."), param="messages")
