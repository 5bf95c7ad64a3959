"""Base of every view of the public API."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, cast

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.cache import get_conditional_response
from rest_framework.exceptions import MethodNotAllowed
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from apps.accounts.login.key_operations import note_key_use
from apps.accounts.members.visibility import seeing, sight_of_key
from apps.accounts.models import Organization, User
from apps.accounts.queries import KeyIdentity, get_organization
from apps.core.database.clock import db_now
from apps.core.database.idempotency import HEADER, answer_once
from apps.core.database.locks import lock
from apps.core.database.tenancy import tenant
from apps.core.errors import InvalidValue
from apps.core.http.origin import with_key
from apps.interfaces.api.requests.conditions import read_if_match, refuse_if_match, require_match, set_etag
from apps.interfaces.api.requests.handlers import is_file, read_arguments
from apps.interfaces.api.requests.idempotency import read_idempotency_key, request_digest

_CONDITIONS_OF_CHANGES = ("HTTP_IF_MATCH", "HTTP_IF_UNMODIFIED_SINCE")


class ApiView(APIView):
    """A view for bearer keys. `required_scope` names the scope of each method that the view answers.

    A handler's parameters `query`, `body` and `form` are read as the types that it gives them, and what it returns
    becomes JSON. The OpenAPI document is made from the same types. Permission check and handler run in one transaction
    that sees only the key's organization. An exception of the handler rolls it back. A POST with an `Idempotency-Key`
    that was answered before gets that answer, without its handler. A change with `If-Match` is made only if GET at its
    address answers with that ETag. The handler finds the key as `self.identity` and its
    organization as `self.organization`.
    """

    required_scope: ClassVar[dict[str, str]] = {}
    # Fields of GET's answer that change by themselves: a change with If-Match is made even if they have changed.
    moving: ClassVar[tuple[str, ...]] = ()
    methods_of_gateway: ClassVar[tuple[str, ...]] = ()  # that the gateway answers at the same address
    examples: ClassVar[dict[str, object]] = {}  # of the body of each method, for the OpenAPI document
    errors: ClassVar[dict[str, tuple[int, ...]]] = {}  # of each method, beside those of all methods of its kind
    identity: KeyIdentity
    organization: Organization
    takes_idempotency_key: ClassVar[bool] = True
    # Set by a handler whose answer needs the effects of its own transaction. It runs once they are committed, and may
    # complete the answer or raise. Such a call takes no Idempotency-Key, which stores the answer in that transaction.
    after_commit: Callable[[], None] | None = None

    def dispatch(self, request: HttpRequest, *args: str, **kwargs: str) -> HttpResponseBase:
        """Dispatch as APIView does, but let an error leave the transaction before it becomes a response."""
        self.args, self.kwargs = args, kwargs
        self.headers = self.default_response_headers
        self.request = self.initialize_request(request, *args, **kwargs)
        try:
            response = self._respond(self.request)
        except Exception as error:  # noqa: BLE001 - handle_exception re-raises unforeseen errors
            response = self.handle_exception(error)
        self.response = self.finalize_response(self.request, cast(Response, response), *args, **kwargs)
        return self.response

    def _respond(self, request: Request) -> HttpResponseBase:
        self.format_kwarg = None
        request.accepted_renderer, request.accepted_media_type = self.perform_content_negotiation(request, force=True)
        self.perform_authentication(request)
        identity = self.identity = cast(KeyIdentity, request.auth)
        with tenant(organization=identity.organization_id):
            note_key_use(identity=identity, now=db_now())
        sight = sight_of_key(project_id=identity.project_id, scopes=identity.scopes)
        with with_key(identity.key_id), seeing(sight), tenant(organization=identity.organization_id):
            self.organization = get_organization(id=identity.organization_id)
            handler = self._handler(request)
            self.check_permissions(request)
            self.check_throttles(request)
            if key := read_idempotency_key(request):
                if not self.takes_idempotency_key:
                    raise InvalidValue(f"This call takes no {HEADER}. Send it without one.", param=HEADER)
                return self._answer_once(request, handler, key)
            answer = self._answer(request, handler)
        if self.after_commit is not None:
            self.after_commit()
        if isinstance(answer, HttpResponseBase):
            return answer
        response = Response(answer)
        if request.method in ("GET", "HEAD"):
            response.add_post_render_callback(partial(_unless_known, request._request, moving=self.moving))
        return response

    def _answer(self, request: Request, handler: Callable[..., object]) -> object:
        arguments = read_arguments(request, handler)
        if condition := read_if_match(request):
            self._require_match(request, condition)
        return handler(request, *self.args, **self.kwargs, **arguments)

    def _require_match(self, request: Request, condition: str) -> None:
        """Raise an error unless GET answers now what the client has read. Later conditional changes wait for this."""
        if not self.has_etag():
            raise refuse_if_match()
        lock(f"if-match:{self.organization.pk}:{request.path}")
        self.organization = get_organization(id=self.organization.pk)  # as it is after the wait
        read: Callable[..., object] = self.get  # type: ignore[attr-defined]
        current = read(request, *self.args, **self.kwargs, **read_arguments(request, read))
        require_match(condition, current, moving=self.moving)

    @classmethod
    def has_etag(cls) -> bool:
        """Return whether GET answers at this address with an object, and so with an ETag."""
        return "GET" in cls.required_scope and not is_file(cls.get)  # type: ignore[attr-defined]

    def _answer_once(self, request: Request, handler: Callable[..., object], key: str) -> HttpResponse:
        """Return the answer to the first request with the key. The answer to a POST is JSON with status 200."""
        answer, is_repeat = answer_once(
            organization=self.organization,
            key_id=self.identity.key_id,
            key=key,
            request_sha256=request_digest(request),
            answer=lambda: JSONRenderer().render(self._answer(request, handler)).decode(),
        )
        headers = {"Idempotent-Replayed": "true"} if is_repeat else {}
        return HttpResponse(answer, content_type=JSONRenderer.media_type, headers=headers)

    def _handler(self, request: Request) -> Callable[..., object]:
        method = (request.method or "").lower()
        is_known = method != "options" and method in self.http_method_names
        handler: Callable[..., object] | None = getattr(self, method, None) if is_known else None
        if handler is None:
            raise MethodNotAllowed(method)
        return handler

    @property
    def allowed_methods(self) -> list[str]:
        own = [method for method in super().allowed_methods if method != "OPTIONS"]
        return [*own, *self.methods_of_gateway]

    @property
    def actor(self) -> str:
        """The actor for the audit log: the key."""
        return self.identity.key_id

    @property
    def creator(self) -> User:
        """The person who made the key, for changes that need a member's role. The audit log names the key as well."""
        return User.objects.get(pk=self.identity.created_by_id)


def _unless_known(request: HttpRequest, response: Response, *, moving: tuple[str, ...]) -> HttpResponseBase:
    """Return the answer with its ETag, or 304 if the client has it already.

    Only `If-None-Match` counts: the other conditions are for changes, and would answer a read with 412 and no body.
    """
    for name in _CONDITIONS_OF_CHANGES:
        request.META.pop(name, None)
    set_etag(response, moving=moving)
    return get_conditional_response(request, etag=response.headers["ETag"], response=response) or response
