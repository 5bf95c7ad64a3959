"""Access to the operator console, for people marked as operators of this installation."""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Concatenate, ParamSpec

from django.http import HttpRequest, HttpResponseBase
from django.utils.translation import gettext

from apps.accounts.login.second_factor import require_of_operator
from apps.accounts.login.sessions import require_recent_sign_in
from apps.accounts.models import User
from apps.core.database.tenancy import system
from apps.core.errors import PermissionDenied
from apps.core.http.access import Access, View, answer, redirect_to_sign_in

P = ParamSpec("P")


def operator_view(view: Callable[Concatenate[HttpRequest, P], HttpResponseBase]) -> View:
    """Require an operator. The view sees every tenant in one transaction, and its actions are audited."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        if not request.user.is_authenticated:
            return redirect_to_sign_in(request)
        return answer(request, partial(_as_operator, request, partial(view, request, *args, **kwargs)))

    guarded.access = Access("operator")  # type: ignore[attr-defined]
    return guarded


def sensitive_operator_view(view: Callable[Concatenate[HttpRequest, P], HttpResponseBase]) -> View:
    """Require an operator. A POST asks for the password again if the operator signed in some time ago."""

    @wraps(view)
    def recent(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        if request.method == "POST":
            require_recent_sign_in(request)
        return view(request, *args, **kwargs)

    return operator_view(recent)


def operator_id(request: HttpRequest) -> str:
    """Return the operator's id, for the audit log."""
    return str(request.user.pk)


def is_only_operator(request: HttpRequest, askers: Iterable[str]) -> bool:
    """Return whether this operator is among the askers, and there is no other one who could approve the request."""
    me = operator_id(request)
    return me in askers and not User.objects.filter(is_operator=True, is_active=True).exclude(pk=me).exists()


def _as_operator(request: HttpRequest, run: Callable[[], HttpResponseBase]) -> HttpResponseBase:
    if not getattr(request.user, "is_operator", False):
        raise PermissionDenied(gettext("These pages are for the operators of this installation."))
    if elsewhere := require_of_operator(request):
        return elsewhere
    with system():
        return run()
