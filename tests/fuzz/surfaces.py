"""What is fuzzed, each for a number of seconds at a time."""

import csv
import gzip
import io
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import requests
import schemathesis
from django.db import transaction
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from apps.contracts import worker_api as wire
from apps.contracts.chat import ChatRenderer, InvalidChatTemplate, RowError, parse_row
from apps.contracts.serving import ObservedState
from apps.contracts.templating.process import TemplateProcess
from apps.datasets.problems import Rejected
from apps.datasets.validation.validator import validate_file
from apps.interfaces.gateway.requests.schema import parse_chat, parse_completion
from apps.interfaces.gateway.surfaces.responses import parse_response
from tests.bench.neighbours.stage import Platform
from tests.bench.neighbours.traffic import as_person
from tests.factories.catalog import make_listed_model
from tests.factories.chat import CHATML, TOKENIZER, assistant, line, user
from tests.fuzz.findings import Findings
from tests.guards.world import Installation, Tenant, make_full_tenant
from tests.support.api.operations import ids_of, with_ids
from tests.support.gateway.hostile_requests import chats, completions, read, responses, schemas, values
from tests.support.page_inputs import FORMS, PAGES, VALUES

Turn = Callable[[float], None]
ByOperation = Callable[[str], dict[str, str]]  # by the operation's label, such as "GET /v1/files"
_HANG_SECONDS = 10.0
_EXAMPLES_AT_ONCE = 25
_KEPT_AS_IT_IS = ("/organization/new", "/organization/switch", "/datasets/{file}/delete")
_ROW = parse_row(line(user(), assistant()), line_number=1)


def surfaces(platform: Platform, findings: Findings) -> dict[str, Turn]:
    """Return the turns by name."""
    found = {"readers": _readers(findings), "files": _files(findings), "templates": _templates(findings)}
    networked = {"api": _api, "gateway": _gateway, "workers": _workers, "pages": _pages}
    return {name: make(platform, findings) for name, make in networked.items()} | found


def _run(findings: Findings, seconds: float, check: Callable[[Any], None], inputs: st.SearchStrategy[Any]) -> None:
    """Draw inputs until the time is over; a check that wants to stop the drawing raises nothing."""
    until, number = time.monotonic() + seconds, itertools.count()
    while time.monotonic() < until:

        @seed(findings.seed * 1_000_003 + next(number))
        @settings(
            max_examples=_EXAMPLES_AT_ONCE,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs)
        def draw(one: Any) -> None:
            if time.monotonic() < until:
                check(one)

        draw()


# --- over the network ------------------------------------------------------------------------------------------------


def _api(platform: Platform, findings: Findings) -> Turn:
    """Every operation of the OpenAPI document. Each turn has a tenant of its own, with one object of each kind."""
    floor = platform.floor
    listed = make_listed_model("llama-3.1-8b", licence="Llama 3.1 Community License")
    installation = Installation(floor.base_model, listed, floor.pool, floor.worker)
    document = schemathesis.openapi.from_url(f"{platform.url}/api/v1/schema")
    names = {one.label: one.definition.raw["operationId"] for one in map(_ok, document.get_all_operations())}
    tenants: list[Tenant] = []

    def known(operation: str) -> dict[str, str]:
        is_trained = "/fine_tuning/" in operation or operation.startswith(("POST /api/", "GET /api/"))
        model = platform.training_model if is_trained else platform.model
        return {"model": model, "purpose": "fine-tune"} | ids_of(names[operation], tenants[-1])

    calling = _calling(
        document, findings, platform.url, known, lambda _: {"Authorization": f"Bearer {tenants[-1].secret}"}
    )

    def turn(seconds: float) -> None:
        name = f"full{len(tenants)}"
        with transaction.atomic():
            tenants.append(make_full_tenant(name, name, installation))
        calling(seconds)

    return turn


_WORKER_BODIES = {
    "claim": wire.ClaimRequest, "enroll": wire.EnrollRequest, "probes": wire.ProbeReport,
    "leases/{lease_id}/heartbeat": wire.HeartbeatRequest, "leases/{lease_id}/events": wire.EventsRequest,
    "leases/{lease_id}/uploads": wire.UploadRequest, "leases/{lease_id}/finish": wire.FinishRequest,
    "replicas/{replica_id}/observed": ObservedState,
}  # fmt: skip


def _workers(platform: Platform, findings: Findings) -> Turn:
    """Every operation of the worker API: a machine that was taken over, with its lease until it ends it."""
    document = schemathesis.openapi.from_dict(_worker_document())
    lease = platform.lease

    def headers(operation: str) -> dict[str, str]:
        secret = lease.token if "/leases/" in operation else platform.bad_worker
        return {"Authorization": f"Bearer {secret}"}

    return _calling(document, findings, platform.internal_url, lambda operation: {"lease_id": lease.id}, headers)


def _worker_document() -> dict[str, Any]:
    """Return the worker API as an OpenAPI document, from the types that read its bodies."""
    bodies, schemas = msgspec.json.schema_components(
        _WORKER_BODIES.values(), ref_template="#/components/schemas/{name}"
    )
    paths = {}
    for path, body in zip(_WORKER_BODIES, bodies, strict=True):
        names = re.findall(r"{(\w+)}", path)
        post = {
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ],
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"default": {"description": "Done, or the error"}},
        }
        paths[f"/internal/v1/{path}"] = {"post": post}
    about = {"title": "Worker API", "version": "1"}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": schemas}}


def _calling(document: Any, findings: Findings, url: str, mine: ByOperation, headers: ByOperation) -> Turn:
    """Call every operation of an OpenAPI document with bodies of its schemas.

    Half of the calls name what exists, as in `mine`. A status that the document lacks is a finding.
    """
    operations = itertools.cycle(map(_ok, document.get_all_operations()))

    def turn(seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            operation = next(operations)
            numbers = itertools.count()

            def call(case: Any, operation: Any = operation, numbers: Iterator[int] = numbers) -> None:
                label = operation.label
                if next(numbers) % 2:  # half of them name what exists
                    with_ids(case, mine(label))
                sent = {"base_url": url, "headers": headers(label), "timeout": _HANG_SECONDS}
                status = _ask(findings, label, lambda: case.call(**sent), case)
                if status and not {str(status), "default"} & set(operation.definition.raw["responses"]):
                    findings.note("undocumented_statuses", f"{label}: {status}", case)

            try:
                _run(findings, min(left, 2.0), call, operation.as_strategy())
            except Unsatisfiable:
                findings.not_sent += 1

    return turn


def _ok(result: Any) -> Any:
    return result.ok()


def _gateway(platform: Platform, findings: Findings) -> Turn:
    """Bodies for the inference routes, through the front door and straight to the gateway."""
    tenant = platform.make_tenant()
    socket = httpx.HTTPTransport(uds=str(platform.home / "gateway.sock"))
    headers = {"Authorization": f"Bearer {tenant.keys[0]}", "Content-Type": "application/json"}
    doors = itertools.cycle(
        [
            httpx.Client(base_url=platform.url, headers=headers, timeout=_HANG_SECONDS),
            httpx.Client(base_url="http://gateway", transport=socket, headers=headers, timeout=_HANG_SECONDS),
        ]
    )
    models = itertools.cycle([None, platform.model])

    def posting(path: str) -> Callable[[Any], None]:
        def post(body: Any) -> None:
            if isinstance(body, dict) and (model := next(models)):
                body = body | {"model": model}
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            _ask(findings, path, lambda: next(doors).post(path, content=raw), body)

        return post

    hi = [{"role": "user", "content": "Hi"}]
    with_schema = schemas.map(
        lambda schema: {
            "messages": hi,
            "max_tokens": 4,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        }
    )
    kinds = [
        ("/v1/chat/completions", chats | with_schema),
        ("/v1/completions", completions),
        ("/v1/responses", responses),
        ("/v1/chat/completions", st.binary(max_size=300)),
    ]

    def turn(seconds: float) -> None:
        for path, bodies in kinds:
            _run(findings, seconds / len(kinds), posting(path), bodies)

    return turn


def _pages(platform: Platform, findings: Findings) -> Turn:
    """Queries and forms of the dashboard, as a member's browser sends them."""
    tenant = platform.make_tenant()
    client = httpx.Client(base_url=platform.url, headers=as_person(tenant), timeout=_HANG_SECONDS)
    usual = [value.encode(errors="replace").decode() for value in VALUES if len(value) < 10_000]  # httpx sends no more
    sent = st.text(max_size=40) | st.sampled_from(usual)
    asked = [("GET", path, {}, names) for path, names in PAGES]
    asked += [("POST", path, fixed, names) for path, fixed, names in FORMS if path not in _KEPT_AS_IT_IS]
    turns = itertools.cycle(asked)

    def turn(seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            method, path, fixed, names = next(turns)
            address = path.format(file=tenant.file_id, job=tenant.job_id)

            def call(values: dict[str, str], method: str = method, address: str = address, fixed: Any = fixed) -> None:
                body = {"params" if method == "GET" else "data": fixed | values}
                _ask(findings, f"{method} {address}", lambda: client.request(method, address, **body), values)

            _run(findings, min(left, 1.0), call, st.fixed_dictionaries({}, optional=dict.fromkeys(names, sent)))

    return turn


def _ask(findings: Findings, where: str, ask: Callable[[], Any], given: object) -> int | None:
    """Return the status of the answer; None if there is none, which is noted."""
    findings.count()
    try:
        status: int = ask().status_code
    except (httpx.TimeoutException, requests.Timeout):
        findings.note("hangs", where, given)
    except (httpx.HTTPError, requests.ConnectionError) as error:
        findings.note("server_errors", f"{where}: {type(error).__name__}", given)
    except (requests.RequestException, ValueError):
        findings.not_sent += 1  # no client can send it, such as a header with a line break
    else:
        findings.count_answer(status, where)
        if status >= 500:
            findings.note("server_errors", f"{where}: {status}", given)
        return status
    return None


# --- in this process --------------------------------------------------------------------------------------------------


def _readers(findings: Findings) -> Turn:
    """Bodies of inference requests."""
    pairs = [(parse_chat, chats), (parse_completion, completions), (parse_response, responses)]

    def turn(seconds: float) -> None:
        for parse, bodies in pairs:
            raw = bodies.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=200)

            def check(one: bytes, parse: Any = parse) -> None:
                findings.read(lambda body: read(parse, body), one, most_seconds=0.2)

            _run(findings, seconds / len(pairs), check, raw)

    return turn


_words = st.text(max_size=20) | st.sampled_from(["role", "content", "messages", "prompt", "completion", "text", "\x00"])
_turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | _words},
    optional={"content": values, "weight": values, "tool_calls": values, "name": values},
)
_rows = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("prompt", "completion", "text", "chosen", "rejected", "input"), values)
    | {"messages": st.lists(_turns, max_size=5) | values, "tools": values}
)  # fmt: skip
_cells = st.lists(st.lists(_words, max_size=5), max_size=8)


def _jsonl(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _csv(rows: list[list[str]]) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows([["prompt", "completion"], *rows])
    return out.getvalue().encode(errors="replace")


def _torn(content: bytes, start: int, left_out: int) -> bytes:
    """Return a file that lacks a part."""
    start %= len(content) + 1
    return content[:start] + content[start + left_out :]


_whole = st.lists(_rows, max_size=8).map(_jsonl) | _cells.map(_csv) | st.binary(max_size=500)
_contents = _whole | st.builds(_torn, _whole | _whole.map(gzip.compress), st.integers(0, 5000), st.integers(0, 20))
_names = st.sampled_from(
    ["a.jsonl", "a.csv", "a.tsv", "a.json", "a.txt", "a.parquet", "a.jsonl.gz", "a.csv.gz", "a", ""]
)


def _files(findings: Findings) -> Turn:
    """Training files, torn, packed and under other names."""

    def validate(given: tuple[str, bytes]) -> None:
        filename, content = given
        try:
            validate_file([content[:100], content[100:]], filename=filename)
        except Rejected:
            return

    def turn(seconds: float) -> None:
        inputs = st.tuples(_names, _contents)
        _run(findings, seconds, lambda one: findings.read(validate, one, most_seconds=2.0), inputs)

    return turn


_PIECES = """{% for m in messages %}|{% endfor %}|{{ m.content }}|{{ m['role'] ~ 'x' }}|{% if m.role == 'user' %}
|{% else %}|{% endif %}|{{ bos_token * 9 }}|{% set x = messages[0] %}|{{ messages[1:] }}|{% macro f(a) %}|{% endmacro %}
|{{ f(messages) }}|{{ ''.__class__.__mro__ }}|{{ raise_exception('x') }}|{% generation %}|{% endgeneration %}
|{% for i in range(10 ** 9) %}|{{ 'a' * 10 ** 10 }}|{{ 1 / 0 }}|{% if add_generation_prompt %}|{{ nothing.x }}
|{{ strftime_now('%Y') }}|{{ cycler.__init__.__globals__ }}|{% include 'x' %}|{{ namespace(a=1).a }}"""
_pieces = st.sampled_from([CHATML, *re.split(r"\n?\|", _PIECES)])
_sources = st.lists(_pieces | st.text(max_size=12), max_size=10).map("".join)


def _templates(findings: Findings) -> Turn:
    """Chat templates, in a process of little time and memory as everywhere."""
    process = TemplateProcess(cpu_seconds=0.5, memory_bytes=256 * 1024 * 1024)

    def render(source: str) -> None:
        try:
            list(ChatRenderer(source, TOKENIZER, process=process).render_many([_ROW]))
        except (InvalidChatTemplate, RowError):
            return

    def turn(seconds: float) -> None:
        try:
            _run(findings, seconds, lambda one: findings.read(render, one, most_seconds=1.0), _sources)
        finally:
            process.stop()

    return turn
