"""Sessions: list and end them, demand a recent sign-in for sensitive acts, and end idle sessions of operators."""

import datetime
import time
from importlib import import_module

from allauth.account.authentication import get_authentication_records
from allauth.core.exceptions import ReauthenticationRequired
from allauth.usersessions.models import UserSession
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY, logout
from django.contrib.sessions.backends.base import SessionBase
from django.contrib.sessions.models import Session
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare
from django.utils.deprecation import MiddlewareMixin
from django.utils.translation import get_language_from_request, gettext, override

from apps.accounts.login.browser_tokens import revoke_browser_tokens
from apps.accounts.login.person_audit import record_for_person
from apps.accounts.models import User
from apps.core.database.clock import db_now
from apps.core.http.access import asks_by_itself, redirect_to_sign_in

MAX_SESSIONS = 20  # of a person; a further sign-in ends the one seen longest ago
_SIGNED_IN_AT, _SEEN_AT, _LAST_SEEN_AT = "signed_in_at", "operator_seen_at", "last_seen_at"
_NOTED_EVERY_SECONDS = 60
_LAST_SEEN_EVERY_SECONDS = 600


def note_sign_in(*, request: HttpRequest, **_: object) -> None:
    """Store when this session began; receiver of Django's `user_logged_in`."""
    request.session[_SIGNED_IN_AT] = request.session[_LAST_SEEN_AT] = time.time()


def find_session(session_key: str) -> tuple[SessionBase, User] | None:
    """Return a session and the person who is signed in to it; None if it has ended."""
    session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    user = User.objects.filter(pk=session.get(SESSION_KEY), is_active=True).first()
    if user is None or session.get(BACKEND_SESSION_KEY) not in settings.AUTHENTICATION_BACKENDS:
        return None
    # Django's get_user would give a session that an old secret key signed a new key, which only a response can tell.
    shown = session.get(HASH_SESSION_KEY) or ""
    hashes = (user.get_session_auth_hash(), *user.get_session_auth_fallback_hash())
    return (session, user) if any(constant_time_compare(shown, each) for each in hashes) else None


def list_sessions(*, user: User) -> list[UserSession]:
    """Return the sessions in which a person is signed in, the most recently seen first."""
    rows = list(UserSession.objects.filter(user=user).order_by("-last_seen_at", "-pk")[:MAX_SESSIONS])
    alive = Session.objects.filter(session_key__in=[row.session_key for row in rows], expire_date__gt=db_now())
    hashes = {user.get_session_auth_hash(), *user.get_session_auth_fallback_hash()}  # a new password changes them
    valid = {each.session_key for each in alive if each.get_decoded().get(HASH_SESSION_KEY) in hashes}
    return [row for row in rows if row.session_key in valid]


@transaction.atomic
def end_sessions(*, user: User, but: str, session_id: int | None = None) -> int:
    """Sign a person out of one session, or of all; return how many. The session with the key `but` stays."""
    rows = UserSession.objects.filter(user=user).exclude(session_key=but)
    if session_id is not None:
        rows = rows.filter(pk=session_id)
    ended = _end(rows, user=user)
    if ended:
        record_for_person(user=user, action="person.sessions_ended", sessions=ended)
    return ended


def end_excess_sessions(*, user: User) -> None:
    """End sessions of a person so that one more stays within MAX_SESSIONS."""
    kept = UserSession.objects.filter(user=user).order_by("-last_seen_at", "-pk").values("pk")[: MAX_SESSIONS - 1]
    _end(UserSession.objects.filter(user=user).exclude(pk__in=kept), user=user)


def sweep_sessions(*, now: datetime.datetime) -> None:
    """Delete expired sessions."""
    Session.objects.filter(expire_date__lt=now).delete()
    UserSession.objects.exclude(session_key__in=Session.objects.values("session_key")).delete()


def _end(rows: QuerySet[UserSession], *, user: User) -> int:
    keys = list(rows.values_list("session_key", flat=True))
    Session.objects.filter(session_key__in=keys).delete()
    UserSession.objects.filter(session_key__in=keys).delete()
    if keys:
        revoke_browser_tokens(user=user, now=db_now())
    return len(keys)


def require_recent_sign_in(request: HttpRequest) -> None:
    """Raise ReauthenticationRequired unless the person signed in or reauthenticated in the last minutes.

    allauth's middleware then asks for the password or second factor and continues the request.
    """
    records = get_authentication_records(request, request.user)
    last = max([request.session.get(_SIGNED_IN_AT, 0), *(record["at"] for record in records)])
    if time.time() - last > settings.ACCOUNT_REAUTHENTICATION_TIMEOUT:
        raise ReauthenticationRequired


class EndIdleOperatorSessions(MiddlewareMixin):
    """Sign operators out after OPERATOR_IDLE_SECONDS without a request; 0 switches this off.

    What an open page asks for by itself counts as none.
    """

    def process_request(self, request: HttpRequest) -> HttpResponse | None:
        if not settings.OPERATOR_IDLE_SECONDS or settings.SESSION_COOKIE_NAME not in request.COOKIES:
            return None
        user = request.user
        if not getattr(user, "is_operator", False):
            return None
        now, seen_at = time.time(), request.session.get(_SEEN_AT)
        if seen_at is not None and now - seen_at > settings.OPERATOR_IDLE_SECONDS:
            record_for_person(user=user, action="person.session_idle")  # type: ignore[arg-type]
            revoke_browser_tokens(user=user, now=db_now())  # type: ignore[arg-type]
            logout(request)
            with override(getattr(user, "language", "") or get_language_from_request(request)):
                messages.info(request, gettext("You were signed out because you were away. Sign in again."))
                return redirect_to_sign_in(request)
        if seen_at is None or (now - seen_at > _NOTED_EVERY_SECONDS and not asks_by_itself(request)):
            request.session[_SEEN_AT] = now
        return None


class NoteLastSeen(MiddlewareMixin):
    """Store when, from where and with which browser a session was last seen, once every few minutes."""

    def process_request(self, request: HttpRequest) -> None:
        if settings.SESSION_COOKIE_NAME not in request.COOKIES or not request.user.is_authenticated:
            return
        if time.time() - request.session.get(_LAST_SEEN_AT, 0) > _LAST_SEEN_EVERY_SECONDS:
            UserSession.objects.create_from_request(request)
            request.session[_LAST_SEEN_AT] = time.time()
