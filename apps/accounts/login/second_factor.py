"""Second factors: authenticator apps, passkeys and recovery codes, and the checks that demand one.

A person with a second factor is asked for it at sign-in. A session that began before the factor was added has not shown
it yet, so pages that demand one check the session too.
"""

import base64
import datetime
from functools import wraps
from typing import Any

from allauth.account.authentication import get_authentication_records
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.models import Authenticator
from allauth.mfa.utils import is_mfa_enabled
from django.conf import settings
from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext

from apps.accounts.login.person_audit import record_for_person
from apps.accounts.models import User
from apps.core.database.clock import db_now
from apps.core.database.tenancy import system
from apps.core.errors import RateLimited
from apps.core.http.access import View, answer
from apps.core.messages.translation import later
from apps.core.models import AuditEntry
from apps.core.secrets.resealing import resealed
from apps.core.secrets.sealing import place_of, seal, unseal

MAX_MADE_AN_HOUR = 20
_ADDED_HERE = "second_factor_added"
_FACTORS = [Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN]
_SEALED = {"secret", "seed"}  # the sealed values of `data`: an app's, and that of recovery codes
_PLACE = place_of(table="mfa_authenticator", column="data", row_id="")


class SecondFactorAdapter(DefaultMFAAdapter):
    """Seals the secrets of authenticator apps and recovery codes in the database."""

    error_messages = DefaultMFAAdapter.error_messages | {
        "incorrect_code": later("That code is not right. Try the next one.")
    }

    def encrypt(self, text: str) -> str:
        return base64.b64encode(seal(text, place=_PLACE)).decode()

    def decrypt(self, encrypted_text: str) -> str:
        return unseal(base64.b64decode(encrypted_text), place=_PLACE)


@transaction.atomic
def reseal_second_factors() -> int:
    """Reseal the secrets of apps and recovery codes that are sealed under an older key; return how many.

    If a value cannot be unsealed, raises SealBroken and changes nothing.
    """
    count = 0
    for row in Authenticator.objects.select_for_update():
        for name in _SEALED & row.data.keys():
            owner = f"mfa_authenticator {row.pk}"
            sealed = resealed(base64.b64decode(row.data[name]), place=_PLACE, owner=owner)
            if sealed is not None:
                row.data[name] = base64.b64encode(sealed).decode()
                row.save(update_fields=["data"])
                count += 1
    return count


def has_second_factor(user: User) -> bool:
    return is_mfa_enabled(user, _FACTORS)


def require_second_factor(request: HttpRequest, *, why: str) -> HttpResponse | None:
    """Return the page for a signed-in person whose session has not shown a second factor; None if it has."""
    user = request.user
    assert isinstance(user, User)
    if not has_second_factor(user):
        messages.info(request, gettext("%(why)s Add an authenticator app or a passkey to continue.") % {"why": why})
        return redirect("mfa_index")
    records = get_authentication_records(request, user)
    if request.session.get(_ADDED_HERE) or any(record["method"] == "mfa" for record in records):
        return None
    path = request.get_full_path() if request.method == "GET" else "/"
    return redirect(f"{reverse('mfa_reauthenticate')}?{urlencode({'next': path})}")


def require_of_operator(request: HttpRequest) -> HttpResponse | None:
    """Return the page for an operator who has not shown a second factor; None if they have or need none."""
    if not settings.OPERATOR_MFA:
        return None
    return require_second_factor(request, why=gettext("Operators of this installation need a second factor."))


def limited(view: View) -> View:
    """Decorate a view that creates factors or codes, so that it refuses a person who creates too many.

    Each adds to the logs of their organizations. The check comes before the view, because allauth reports a new factor
    only after the commit.
    """

    @wraps(view)
    def checked(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        def run() -> HttpResponseBase:
            if request.method == "POST" and isinstance(request.user, User):
                _require_few(request.user)
            return view(request, *args, **kwargs)

        return answer(request, run)

    return checked


def _require_few(user: User) -> None:
    made = ("person.second_factor_added", "person.recovery_codes_made")
    since = db_now() - datetime.timedelta(hours=1)
    with system():
        rows = AuditEntry.objects.filter(organization=None, actor=user.pk, action__in=made, created_at__gt=since)
        count = rows[:MAX_MADE_AN_HOUR].count()
    if count >= MAX_MADE_AN_HOUR:
        text = gettext("You added %(most)s second factors and sets of recovery codes within an hour. Try again later.")
        raise RateLimited(text % {"most": MAX_MADE_AN_HOUR}, retry_after_seconds=3600)


def note_added(*, request: HttpRequest, user: User, authenticator: Authenticator, **_: object) -> None:
    request.session[_ADDED_HERE] = True
    record_for_person(user=user, action="person.second_factor_added", kind=authenticator.type)


def note_removed(*, user: User, authenticator: Authenticator, **_: object) -> None:
    record_for_person(user=user, action="person.second_factor_removed", kind=authenticator.type)


def note_reset(*, user: User, authenticator: Authenticator, **_: object) -> None:
    record_for_person(user=user, action="person.recovery_codes_made", kind=authenticator.type)


def note_failed(*, user: User, authenticator: Authenticator, **_: object) -> None:
    record_for_person(user=user, action="person.second_factor_failed", by="anonymous", kind=authenticator.type)
