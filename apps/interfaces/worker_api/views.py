"""The HTTP views of /internal/v1: parse, authenticate, one domain call, encode."""

import functools
import hmac
import re
from collections.abc import Callable
from typing import TypeVar, cast

import msgspec
from django.core.exceptions import RequestDataTooBig
from django.core.handlers.asgi import ASGIRequest
from django.db import transaction
from django.http import HttpRequest, HttpResponse

from apps.catalog.queries import open_hub_token
from apps.contracts import worker_api as wire
from apps.contracts.serving import ObservedState
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, InvalidValue, NotFound, PermissionDenied
from apps.core.http.asgi import Scope, TooLarge
from apps.core.http.json_bodies import decode_body
from apps.core.http.turns import CALLER
from apps.finetuning.conversions import leases as conversion_leases
from apps.finetuning.models import Worker
from apps.finetuning.pools import operations, rehearsals
from apps.finetuning.pools.capacity.metrics import render_pool_metrics
from apps.finetuning.results import examinations
from apps.finetuning.runs import endings, judges, leases, members, reports, uploads
from apps.finetuning.runs.leases import Lease
from apps.interfaces.worker_api import probes
from apps.interfaces.worker_api.metrics import render_installation_metrics
from apps.serving import operations as serving
from apps.serving.metrics import CONTENT_TYPE, metrics_token, render_metrics
from apps.serving.models import Replica

Body = TypeVar("Body")
_ESCAPE = re.compile(rb"\\(?:u0000|.)", re.DOTALL)
View = Callable[..., HttpResponse]


def endpoint(method: str) -> Callable[[View], View]:
    """Answer one HTTP method, and domain errors as OpenAI-shaped JSON."""

    def decorate(view: View) -> View:
        @functools.wraps(view)
        def wrapped(request: HttpRequest, **kwargs: str) -> HttpResponse:
            if request.method != method:
                return HttpResponse(status=405, headers={"Allow": method})
            try:
                return view(request, **kwargs)
            except DomainError as error:
                return _json(error.as_openai(), status=int(error.status))

        return wrapped

    return decorate


@endpoint("POST")
def enroll(request: HttpRequest) -> HttpResponse:
    body = _decode(request, wire.EnrollRequest)
    with transaction.atomic():  # a machine whose address is refused keeps its enrolment token
        worker, token, answer = operations.enroll(request=body)
        if token.base_model is None:
            return _json(answer)
        replica, replica_token = serving.register_replica(
            worker_id=worker.pk, base_model=token.base_model, url=body.listen_url, whole_model=token.whole_model
        )
        base = None if token.whole_model else replica.base_model
        answer = msgspec.structs.replace(
            answer,
            replica_id=replica.pk,
            replica_token=replica_token,
            base_model=serving.describe_model(replica=replica),
            files_sha256=base.files_sha256 if base else {},
            hub_token=open_hub_token(base_model=base) if base else None,
            is_whole_model=token.whole_model is not None,
        )
    return _json(answer)


@endpoint("POST")
def claim(request: HttpRequest) -> HttpResponse:
    worker = _worker(request)
    body = _decode(request, wire.ClaimRequest)
    if body.api_version != wire.API_VERSION:
        text = (
            f"This platform speaks version {wire.API_VERSION}, and the worker {body.api_version}. Update the older one."
        )
        raise InvalidValue(text, param="api_version")
    answer = members.claim(worker=worker, request=body)
    return HttpResponse(status=204) if answer is None else _json(answer)


@endpoint("POST")
def heartbeat(request: HttpRequest, lease_id: str) -> HttpResponse:
    return _json(leases.heartbeat(lease=_lease(request, lease_id), beat=_decode(request, wire.HeartbeatRequest)))


@endpoint("POST")
def keep_place(request: HttpRequest, lease_id: str) -> HttpResponse:
    _decode(request, wire.HeartbeatRequest)
    return _json(members.heartbeat(lease=_lease(request, lease_id)))


@endpoint("POST")
def leave(request: HttpRequest, lease_id: str) -> HttpResponse:
    members.leave(lease=_lease(request, lease_id), outcome=_decode(request, wire.LeaveRequest))
    return HttpResponse(status=204)


@endpoint("POST")
def report_events(request: HttpRequest, lease_id: str) -> HttpResponse:
    body = _decode(request, wire.EventsRequest)
    return _json(reports.record_events(lease=_lease(request, lease_id), reported=body.events))


@endpoint("POST")
def create_upload(request: HttpRequest, lease_id: str) -> HttpResponse:
    body = _decode(request, wire.UploadRequest)
    lease = _lease(request, lease_id)
    return _json(uploads.create_upload(lease=lease, manifest=body.manifest, manifest_sha256=body.manifest_sha256))


@endpoint("POST")
def open_judge(request: HttpRequest, lease_id: str) -> HttpResponse:
    return _json(judges.open_judge(lease=_lease(request, lease_id), now=db_now()))


@endpoint("POST")
def finish(request: HttpRequest, lease_id: str) -> HttpResponse:
    body = _decode(request, wire.FinishRequest)
    run, job = endings.finish_run(lease=_lease(request, lease_id), outcome=body.outcome)
    return _json(wire.FinishResponse(run_status=run.status, job_status=job.status))


@endpoint("GET")
def list_missing_probes(request: HttpRequest) -> HttpResponse:
    about_to_measure = request.GET.get("base_model", "")
    missing = probes.list_missing(worker=_worker(request), about_to_measure=about_to_measure)
    return _json(wire.MissingProbes(probes=missing))


@endpoint("POST")
def report_probe(request: HttpRequest) -> HttpResponse:
    probes.record(worker=_worker(request), report=_decode(request, wire.ProbeReport))
    return HttpResponse(status=204)


@endpoint("POST")
def take_rehearsal(request: HttpRequest) -> HttpResponse:
    taken = rehearsals.take(worker=_worker(request))
    return HttpResponse(status=204) if taken is None else _json(taken)


@endpoint("POST")
def report_rehearsal(request: HttpRequest) -> HttpResponse:
    rehearsals.record(worker=_worker(request), report=_decode(request, wire.RehearsalReport))
    return HttpResponse(status=204)


@endpoint("POST")
def take_examination(request: HttpRequest) -> HttpResponse:
    taken = examinations.take(worker=_worker(request))
    return HttpResponse(status=204) if taken is None else _json(taken)


@endpoint("POST")
def report_examination(request: HttpRequest) -> HttpResponse:
    examinations.record(worker=_worker(request), report=_decode(request, wire.ExaminationReport))
    return HttpResponse(status=204)


@endpoint("POST")
def take_conversion(request: HttpRequest) -> HttpResponse:
    taken = conversion_leases.take(worker=_worker(request), claim=_decode(request, wire.ConversionClaim))
    return HttpResponse(status=204) if taken is None else _json(taken)


@endpoint("POST")
def keep_conversion(request: HttpRequest, conversion_id: str) -> HttpResponse:
    conversion_leases.beat(worker=_worker(request), conversion_id=conversion_id)
    return HttpResponse(status=204)


@endpoint("POST")
def create_conversion_upload(request: HttpRequest, conversion_id: str) -> HttpResponse:
    worker, body = _worker(request), _decode(request, wire.UploadRequest)
    return _json(conversion_leases.create_upload(worker=worker, conversion_id=conversion_id, request=body))


@endpoint("POST")
def finish_conversion(request: HttpRequest, conversion_id: str) -> HttpResponse:
    report = _decode(request, wire.ConversionReport)
    conversion_leases.finish(worker=_worker(request), conversion_id=conversion_id, report=report)
    return HttpResponse(status=204)


@endpoint("GET")
def desired(request: HttpRequest, replica_id: str) -> HttpResponse:
    replica = _replica(request, replica_id)
    if request.GET.get("known_generation") == str(replica.generation):
        return HttpResponse(status=204)
    return _json(serving.desired_state(replica=replica))


@endpoint("POST")
def observed(request: HttpRequest, replica_id: str) -> HttpResponse:
    serving.record_observed(replica=_replica(request, replica_id), observed=_decode(request, ObservedState))
    return HttpResponse(status=204)


@endpoint("GET")
def metrics(request: HttpRequest) -> HttpResponse:
    """Return the figures of the whole installation, for a monitor with its own token."""
    if not hmac.compare_digest(_bearer(request).encode(), metrics_token().encode()):
        raise PermissionDenied("Metrics need the token that the operator's page of a replica shows.")
    _scope(request)[CALLER] = "monitor"
    text = render_installation_metrics() + render_metrics() + render_pool_metrics()
    return HttpResponse(text, content_type=CONTENT_TYPE)


def _worker(request: HttpRequest) -> Worker:
    worker = operations.authenticate(credential=_bearer(request))
    _scope(request)[CALLER] = worker.pk
    return worker


def _lease(request: HttpRequest, lease_id: str) -> Lease:
    """Return the lease that the call is made under, and have it count as one of the worker that holds it."""
    lease, scope = Lease(id=lease_id, token=_bearer(request)), _scope(request)
    if CALLER not in scope and (worker_id := members.find_holder(lease=lease)):
        scope[CALLER] = worker_id
    return lease


def _scope(request: HttpRequest) -> Scope:
    return cast(Scope, request.scope) if isinstance(request, ASGIRequest) else {}


def _replica(request: HttpRequest, replica_id: str) -> Replica:
    worker = _worker(request)
    replica = Replica.objects.select_related("base_model", "whole_model").filter(pk=replica_id, worker=worker).first()
    if replica is None:
        raise NotFound("No replica of this worker has this id.", param="replica_id")
    return replica


def _bearer(request: HttpRequest) -> str:
    scheme, _, credential = request.headers.get("Authorization", "").partition(" ")
    return credential if scheme == "Bearer" else ""


def _decode(request: HttpRequest, kind: type[Body]) -> Body:
    try:
        raw = request.body
    except RequestDataTooBig as error:
        raise TooLarge("The body has more than 2 MiB.") from error
    if rb"\u0000" in raw:  # PostgreSQL stores no NUL, but a log line may hold one
        raw = _ESCAPE.sub(lambda found: rb"\ufffd" if found[0] == rb"\u0000" else found[0], raw)
    return decode_body(raw, msgspec.json.Decoder(kind))


def _json(value: object, status: int = 200) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(value), status=status, content_type="application/json")
