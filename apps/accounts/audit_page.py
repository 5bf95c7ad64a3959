"""The context of an audit log page, shared by the dashboard and the operator console."""

import datetime
import re
from collections.abc import Mapping
from typing import Any

from django.urls import reverse
from django.utils.dateparse import parse_date
from django.utils.http import urlencode
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.accounts.queries import names_of_actors
from apps.core.audit_log import PAGE, AuditFilter, list_entries, read_filter
from apps.core.database.read_times import counted_read
from apps.core.errors import InvalidValue
from apps.core.models import AuditEntry
from apps.core.money import dollars

_EMPTY: tuple[object, ...] = (None, "", [], {})
_FIELDS = ("actor", "action", "target", "since", "until", "organization")


def page_context(
    query: Mapping[str, str], *, organization: Organization | None, pages: Mapping[str, str], size: int = PAGE
) -> dict[str, Any]:
    """Return the context of a page of an organization's log; for None, of the platform's own log.

    `pages` names the view of each kind of id, by its prefix. With an invalid filter, `error` is set and the newest
    entries are shown.
    """
    error = ""
    try:
        chosen = read_filter(with_last_day(query))
    except InvalidValue as refused:
        chosen, error = AuditFilter(), refused.message
    with counted_read():
        found = list(list_entries(organization=organization, chosen=chosen)[: size + 1])
    entries, has_more = found[:size], len(found) > size
    names = names_of_actors(organization=organization, actors={entry.actor for entry in entries})
    asked = {name: query[name] for name in _FIELDS if query.get(name)}
    return {
        "rows": [
            {
                "entry": entry,
                "who": names[entry.actor],
                "details": in_words(entry.details),
                "url": _url_of(entry, pages),
            }
            for entry in entries
        ],
        "asked": asked,
        "error": error,
        "query": urlencode(asked),
        "older": f"?{urlencode(asked | {'after': str(entries[-1].pk)})}" if has_more else "",
        "newest": f"?{urlencode(asked)}" if chosen.after is not None else "",
    }


def with_last_day(query: Mapping[str, str]) -> dict[str, str]:
    """Return the query of a page's form, which names the last day, as `read_filter` takes it: until the next one."""
    given = dict(query.items())
    try:
        last = parse_date(given.get("until", "").strip())
        return given | ({"until": str(last + datetime.timedelta(days=1))} if last else {})
    except (ValueError, OverflowError):
        return given


def _url_of(entry: AuditEntry, pages: Mapping[str, str]) -> str:
    """Return the address of the entry's target; "" if it has no page, or if the entry records its deletion."""
    found = re.fullmatch("([a-z]+)[-_][0-9a-z]+", entry.target)
    view = pages.get(found[1]) if found and not entry.action.endswith("deleted") else None
    return reverse(view, args=[entry.target]) if view else ""


def in_words(details: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the details of an entry as names and texts.

    An empty text means that the value is not set, for example after a change.
    """
    return [_pair(name, value) for name, value in details.items()]


def _pair(name: str, value: object) -> tuple[str, str]:
    if value in _EMPTY:
        return name.removesuffix("_nano").replace("_", " "), gettext("not set")
    if name.endswith("_nano") and isinstance(value, int):
        return name.removesuffix("_nano").replace("_", " "), dollars(value)
    return name.replace("_", " "), _text(value)


def _text(value: object) -> str:
    if value in _EMPTY:
        return gettext("not set")
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, text in in_words(value))
    if isinstance(value, list):
        return ", ".join(_text(each) for each in value)
    if isinstance(value, bool):
        return gettext("yes") if value else gettext("no")
    return str(value)
