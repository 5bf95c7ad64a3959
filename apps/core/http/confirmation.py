"""Actions that lose work or traffic. A page first shows what will happen to each chosen row, and asks for the name.

The same page serves one row and many, and works without JavaScript. Afterwards it shows the refused rows with their
reasons. An action that can be undone runs at once, and its message offers to undo it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext

from apps.core.errors import DomainError, InvalidValue, NotFound

MAX_ROWS = 100
_SESSION_REFUSED = "refused_rows"
Request = TypeVar("Request", bound=HttpRequest)


@dataclass(frozen=True)
class AffectedRow:
    """A chosen row: its name, the effect of the action, and the reason if it was refused.

    `url` is the page to show after an action on this row alone; "" for the list.
    """

    id: str
    name: str
    effect: str
    url: str = ""
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class ConfirmedAction(Generic[Request]):
    """An action on the rows whose ids `parameter` holds. `find` leaves out unknown ids; `act` raises DomainError."""

    parameter: str
    verb: str
    nouns: tuple[str, str]  # one, several
    warning: str
    done: str  # the beginning of the message, such as "Deleted"
    list_url_name: str
    list_title: str
    find: Callable[[Request, Sequence[str]], list[AffectedRow]]
    act: Callable[[Request, str], object]
    is_typed: bool = True  # False where a button is enough: only the reader loses anything

    def name(self, rows: Sequence[AffectedRow]) -> str:
        """Return the name of a single row, or the number of rows, such as "3 datasets"."""
        return " ".join(rows[0].name.split()) if len(rows) == 1 else f"{len(rows)} {self.nouns[1]}"


def say_undoable(request: HttpRequest, text: str, *, url: str, **fields: str) -> None:
    """Show a message about the action, with a button that posts these fields to the address that undoes it."""
    messages.success(request, text, extra_tags=json.dumps({"url": url, "fields": fields}))


def confirm(request: Request, action: ConfirmedAction[Request]) -> HttpResponse:
    """Show what the action will do. A POST does it, with the name typed in full if the action asks for it.

    Each row has a separate transaction. A refused row stays as it is and is shown with the reason. Raises NotFound if
    no row is known.
    """
    given = request.POST if request.method == "POST" else request.GET
    ids = list(dict.fromkeys(given.getlist(action.parameter)))
    try:
        if not 0 < len(ids) <= MAX_ROWS:
            raise InvalidValue(
                gettext("Choose between 1 and %(most)s %(nouns)s in the list.")
                % {"most": MAX_ROWS, "nouns": action.nouns[1]}
            )
        rows = action.find(request, [pk for pk in ids if "\x00" not in pk])
    except InvalidValue as error:
        messages.error(request, error.message)
        return redirect(action.list_url_name)
    if not rows:
        raise NotFound(gettext("No such %(nouns)s.") % {"nouns": action.nouns[0]})
    back = rows[0].url if len(rows) == 1 and rows[0].url else reverse(action.list_url_name)
    name, problem = action.name(rows), ""
    typed = name if action.is_typed else ""
    if request.method == "POST":
        if not typed or " ".join(request.POST.get("confirm", "").split()) == typed:
            return _carry_out(request, action, rows, back)
        problem = gettext("Type %(typed)s to confirm.") % {"typed": typed}
    else:
        refused = request.session.pop(_SESSION_REFUSED, {})
        rows = [replace(row, refusal=refused.get(row.id, "")) for row in rows]
    context = {
        "action": action,
        "rows": rows,
        "back": back,
        "title": gettext("%(verb)s %(what)s?") % {"verb": action.verb, "what": name},
        "button": gettext("%(verb)s %(what)s")
        % {"verb": action.verb, "what": action.nouns[0] if len(rows) == 1 else name},
        "gone": len(ids) - len(rows),
        "has_refusals": any(row.refusal for row in rows),
        "typed": typed,
        "problem": problem,
    }
    return render(request, "shell/confirmation.html", context, status=422 if problem else 200)


def _carry_out(
    request: Request, action: ConfirmedAction[Request], rows: Sequence[AffectedRow], back: str
) -> HttpResponse:
    refused: dict[str, str] = {}
    for row in rows:
        try:
            with transaction.atomic():
                action.act(request, row.id)
        except DomainError as error:
            refused[row.id] = error.message
    if done := [row for row in rows if row.id not in refused]:
        messages.success(request, gettext("%(done)s %(what)s.") % {"done": action.done, "what": action.name(done)})
    if not refused:
        return redirect(back)
    request.session[_SESSION_REFUSED] = refused
    return redirect(f"{request.path}?{urlencode({action.parameter: list(refused)}, doseq=True)}")
