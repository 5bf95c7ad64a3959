"""Reading the audit log: filters, keyset pages, and lines for export."""

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils.dateparse import parse_date, parse_datetime
from django.utils.translation import gettext

from apps.core.audit import MAX_PER_HOUR
from apps.core.database.read_times import counted_read
from apps.core.database.tenancy import Keyed, id_of
from apps.core.errors import InvalidValue
from apps.core.http.csv_text import csv_chunks
from apps.core.models import AuditEntry

PAGE = 50
MAX_EXPORTED = 10_000  # per file; `after` or `until` selects older entries
COLUMNS = ("id", "created_at", "actor", "action", "target", "ip", "user_agent", "details")
_MAX_VALUE = 128
_MAX_ID = 18  # digits of a bigint


@dataclass(frozen=True, kw_only=True)
class AuditFilter:
    """The entries to read. "" and None leave a field open.

    An `action` that ends in a dot matches all actions under it.
    """

    actor: str = ""
    action: str = ""
    target: str = ""
    since: datetime.datetime | None = None
    until: datetime.datetime | None = None
    after: int | None = None  # an id; only older entries match


def read_filter(given: Mapping[str, object]) -> AuditFilter:
    """Read actor, action, target, since, until (ISO 8601, UTC) and after from a query. Raises InvalidValue."""
    texts = {name: str(given.get(name) or "").strip()[:_MAX_VALUE] for name in ("actor", "action", "target")}
    return AuditFilter(**texts, since=_moment(given, "since"), until=_moment(given, "until"), after=_id(given))


def _moment(given: Mapping[str, object], name: str) -> datetime.datetime | None:
    text = str(given.get(name) or "").strip()
    if not text:
        return None
    try:
        found = parse_datetime(text) or parse_date(text)
    except ValueError:  # it looks like a date but is not one
        found = None
    if found is None:
        raise InvalidValue(
            gettext("'%(name)s' is a date or time such as 2026-01-31 or 2026-01-31T12:00:00Z.") % {"name": name},
            param=name,
        )
    if not isinstance(found, datetime.datetime):
        found = datetime.datetime.combine(found, datetime.time())
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def _id(given: Mapping[str, object]) -> int | None:
    text = str(given.get("after") or "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_ID):
        raise InvalidValue(gettext("'after' is the id of an entry."), param="after")
    return int(text)


def list_entries(*, organization: Keyed | str | None, chosen: AuditFilter) -> QuerySet[AuditEntry]:
    """Return an organization's entries, newest first; for None, the platform's own."""
    rows = AuditEntry.objects.filter(organization_id=id_of(organization) or None).order_by("-id")
    equal = {"actor": chosen.actor, "target": chosen.target}
    rows = rows.filter(**{name: value for name, value in equal.items() if value})
    if chosen.action:
        lookup = "action__startswith" if chosen.action.endswith(".") else "action"
        rows = rows.filter(**{lookup: chosen.action})
    if chosen.since:
        rows = rows.filter(created_at__gte=chosen.since)
    if chosen.until:
        rows = rows.filter(created_at__lt=chosen.until)
    return rows.filter(id__lt=chosen.after) if chosen.after is not None else rows


def count_of_hour(*, organization: Keyed | str, action: str) -> int:
    """Return how many of an organization's newest MAX_PER_HOUR entries have the action and are of the last hour."""
    newest = AuditEntry.objects.filter(organization_id=id_of(organization)).order_by("-id")[:MAX_PER_HOUR]
    within = AuditEntry.objects.filter(created_at__gt=Now() - datetime.timedelta(hours=1))
    return within.filter(pk__in=newest.values("pk"), action=action).count()


class AuditObject(TypedDict):
    """An entry as the API shows it."""

    id: str
    object: Literal["audit.entry"]
    created_at: int
    actor: str
    action: str
    target: str
    ip: str | None
    user_agent: str | None
    details: dict[str, Any]


def as_object(entry: AuditEntry) -> AuditObject:
    """Return an entry as the API shows it."""
    return {
        "id": str(entry.pk),
        "object": "audit.entry",
        "created_at": int(entry.created_at.timestamp()),
        "actor": entry.actor,
        "action": entry.action,
        "target": entry.target,
        "ip": entry.ip,
        "user_agent": entry.user_agent or None,
        "details": entry.details,
    }


def export(rows: QuerySet[AuditEntry], *, kind: str) -> tuple[Iterator[bytes], str]:
    """Return the newest entries as the chunks of a `csv` or `jsonl` file, and its media type. Raises InvalidValue.

    The rows are read at once, because a response is sent after its transaction.
    """
    if kind not in ("csv", "jsonl"):
        raise InvalidValue(gettext("An export must be csv or jsonl."), param="export")
    with counted_read():
        found = list(rows[:MAX_EXPORTED])
    if kind == "jsonl":
        return ((json.dumps(as_object(entry)) + "\n").encode() for entry in found), "application/jsonl"
    cells = ([_cell(entry, column) for column in COLUMNS] for entry in found)
    return csv_chunks(COLUMNS, cells), "text/csv; charset=utf-8"


def _cell(entry: AuditEntry, column: str) -> object:
    value = getattr(entry, column)
    if column == "created_at":
        return value.isoformat()
    return json.dumps(value) if column == "details" else value
