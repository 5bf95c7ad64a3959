"""The age of a session: recent enough for a sensitive act, and not idle too long with an operator's rights."""

import time

from allauth.account.authentication import get_authentication_records
from allauth.core.exceptions import ReauthenticationRequired
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import logout
from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse
from django.utils.deprecation import MiddlewareMixin

from apps.accounts.login.person_audit import record_for_person

_SIGNED_IN_AT, _SEEN_AT = "signed_in_at", "operator_seen_at"
_NOTED_EVERY_SECONDS = 60


def note_sign_in(*, request: HttpRequest, **_: object) -> None:
    """Store when this session began; receiver of Django's `user_logged_in`."""
    request.session[_SIGNED_IN_AT] = time.time()


def require_recent_sign_in(request: HttpRequest) -> None:
    """Raise ReauthenticationRequired unless the person signed in, or confirmed it, in the last minutes.

    allauth's middleware then asks for the password or second factor and continues the request.
    """
    records = get_authentication_records(request, request.user)
    last = max([request.session.get(_SIGNED_IN_AT, 0), *(record["at"] for record in records)])
    if time.time() - last > settings.ACCOUNT_REAUTHENTICATION_TIMEOUT:
        raise ReauthenticationRequired


class EndIdleOperatorSessions(MiddlewareMixin):
    """Sign operators out after OPERATOR_IDLE_SECONDS without a request; 0 switches this off."""

    def process_request(self, request: HttpRequest) -> HttpResponse | None:
        if not settings.OPERATOR_IDLE_SECONDS or settings.SESSION_COOKIE_NAME not in request.COOKIES:
            return None
        user = request.user
        if not getattr(user, "is_operator", False):
            return None
        now, seen_at = time.time(), request.session.get(_SEEN_AT)
        if seen_at is not None and now - seen_at > settings.OPERATOR_IDLE_SECONDS:
            record_for_person(user=user, action="person.session_idle")  # type: ignore[arg-type]
            logout(request)
            messages.info(request, "You were signed out because you were away. Sign in again.")
            return redirect_to_login(request.get_full_path() if request.method == "GET" else "/")
        if seen_at is None or now - seen_at > _NOTED_EVERY_SECONDS:
            request.session[_SEEN_AT] = now
        return None
