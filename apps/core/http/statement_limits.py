"""Answers to requests with a statement that PostgreSQL could not run, or stopped (deploy/postgres/roles.sql)."""

import logging
import math
import sys
import time

from django.conf import settings
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from django.utils.deprecation import MiddlewareMixin
from django.utils.translation import gettext
from psycopg import OperationalError
from psycopg.errors import (
    AdminShutdown,
    CannotConnectNow,
    CrashShutdown,
    DeadlockDetected,
    DiskFull,
    IdleInTransactionSessionTimeout,
    LockNotAvailable,
    QueryCanceled,
    TooManyConnections,
    TransactionTimeout,
)

from apps.core.errors import DomainError, Status, Unavailable
from apps.core.http.asgi import ServerFault, error_headers, error_response, is_machine_path, plain_page

logger = logging.getLogger(__name__)

# The shorter of the two limits in roles.sql that end a session: idle_in_transaction_session_timeout.
SESSION_SECONDS = 30 * 60


class QueryTimeout(DomainError):
    """A statement took too long. It would take as long the next time, so clients must not repeat the request."""

    code = "query_timeout"
    status = Status.UNAVAILABLE
    type = "server_error"


class RowsInUse(Unavailable):
    """Another transaction holds rows that the request needs."""

    code = "rows_in_use"


class RefuseStoppedStatements(MiddlewareMixin):
    """Answers 503 if a view ended because its statement was stopped. The view's transaction is rolled back."""

    def process_request(self, request: HttpRequest) -> None:
        request.began_at = time.monotonic()  # type: ignore[attr-defined]

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        refusal = _refusal_of(exception, request)
        if refusal is None:
            return None
        logger.warning("%s %r was refused", request.method, request.path, exc_info=exception)
        return _stopped(request, refusal)


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer a request that ended with an exception in its view or in a middleware.

    Pages are rendered without the request, because their frame would query the database, which may have failed.
    """
    refusal = _refusal_of(sys.exc_info()[1], request)
    if refusal is not None:
        return _stopped(request, refusal)
    if is_machine_path(request.path):
        return error_response(ServerFault(gettext("The server had an error while processing your request.")))
    heading = gettext("Something went wrong on our side")
    text = gettext("We've recorded the error. Your last step may not have been saved.")
    return _page(request, 500, heading, text)


def _stopped(request: HttpRequest, refusal: DomainError) -> HttpResponse:
    if is_machine_path(request.path):
        return error_response(refusal)
    took_long = isinstance(refusal, QueryTimeout | RowsInUse)
    heading = gettext("That took too long") if took_long else gettext("We can't answer right now")
    return _page(request, int(refusal.status), heading, refusal.message, error_headers(refusal))


def _page(
    request: HttpRequest, status: int, heading: str, message: str, headers: dict[str, str] | None = None
) -> HttpResponse:
    page = plain_page(
        status,
        heading,
        message,
        is_signed_in=settings.SESSION_COOKIE_NAME in request.COOKIES,  # whose session is not read
        can_repeat=request.method == "GET",
        request_id=getattr(request, "id", ""),
    )
    return HttpResponse(page, status=status, headers=headers)


def _refusal_of(exception: BaseException | None, request: HttpRequest) -> DomainError | None:
    if not isinstance(exception, DatabaseError):
        return None
    if _took_too_long(exception.__cause__, request):
        return QueryTimeout(
            gettext(
                "The database took too long for this, so it was stopped. Nothing was changed. Ask for less: a "
                "shorter period, fewer rows, or a filter or search that matches less."
            )
        )
    match exception.__cause__:
        case LockNotAvailable() | DeadlockDetected():
            return RowsInUse(
                gettext("Another request is changing the same data. Nothing was changed. Try again in a few seconds."),
                retry_after_seconds=2,
            )
        case DiskFull():
            return Unavailable(
                gettext("The database has no room right now. Nothing was changed. Try again in a minute."),
                retry_after_seconds=60,
            )
        case (
            AdminShutdown()
            | CrashShutdown()
            | CannotConnectNow()
            | TooManyConnections()
            | OperationalError(sqlstate=None)
        ):
            return Unavailable(
                gettext("The database did not answer. Try again in a few seconds."), retry_after_seconds=5
            )
    return None


def _took_too_long(cause: BaseException | None, request: HttpRequest) -> bool:
    match cause:
        case QueryCanceled() | TransactionTimeout() | IdleInTransactionSessionTimeout():
            return True
        case OperationalError(sqlstate=None):
            # Without a code the session is gone: the server's reason does not always arrive before its end.
            return time.monotonic() - getattr(request, "began_at", math.inf) >= SESSION_SECONDS
    return False
