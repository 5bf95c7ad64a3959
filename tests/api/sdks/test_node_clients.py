"""OpenAI's clients for Node.js, and any client that sends a body in chunks, without saying how long it is."""

import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import openai
import pytest

from apps.accounts.notices import endpoints
from apps.accounts.notices.events import EVENT_TYPES, announce
from apps.core.messages.outbox import deliver_due
from scripts.installation.clients import node_obstacle
from tests.factories.accounts import make_key
from tests.factories.datasets import jsonl
from tests.factories.finetuning import TrainingSetup, make_training_file
from tests.support.asgi import origin  # noqa: F401 - a fixture
from tests.twins.http_server import Answer, Request, serve_http

CLIENTS = Path(__file__).resolve().parents[3] / ".anneal/node"
SCRIPTS = Path(__file__).parent / "node"
OLDER = ("openai-5", "openai-6")  # than "openai", the newest generation
NIGHTLY = [pytest.param(each, marks=pytest.mark.nightly) for each in OLDER]
BOUNDARY = "a-boundary"


def run_script(name: str, *arguments: str | Path) -> Any:
    """Run a script with the clients for Node, and return what it saw."""
    assert shutil.which("node"), "node is missing: make setup-dev"
    if obstacle := node_obstacle():
        pytest.skip(obstacle)
    command = ["node", SCRIPTS / name, *arguments]
    done = subprocess.run(command, cwd=CLIENTS, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["openai-4", *NIGHTLY, "openai"])
def test_every_call_works_with_the_clients_for_node(origin, organization, alice, tmp_path: Path, client: str) -> None:  # noqa: F811
    assert (CLIENTS / "node_modules" / client).exists(), f"{CLIENTS} is missing or old: make setup-dev"
    file_id = make_training_file(organization, TrainingSetup(organization).base_model).pk
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(jsonl())

    seen = run_script("session.mjs", origin, make_key(organization, alice).secret, client, rows, file_id)

    assert seen["file"] == {"status": "uploaded", "filename": "rows.jsonl", "isEqual": True}
    assert seen["forms"] == ["größe 日本.jsonl", 86400, "unknown_file", "evals"]
    assert seen["bytes"].endswith("Send a file as one part with a filename.")
    assert seen["upload"] == {"status": "completed", "isEqual": True}
    assert seen["job"] == {"status": "queued", "epochs": 2, "metadata": {"a": "b"}} and seen["retrieved"]
    assert "Created fine-tuning job" in seen["events"] and len(seen["events"]) == len(set(seen["events"])) > 1
    assert (seen["reward"], seen["grader"]) == (1, "a")
    assert (seen["cancelled"], seen["models"], seen["deleted"]) == ("cancelled", ["anneal-demo"], True)
    assert seen["after"] == ["NotFoundError", 404, "file_not_found", "errors#file_not_found"]


@pytest.mark.slow
@pytest.mark.parametrize("client", [*NIGHTLY, "openai"])
def test_events_of_jobs_and_batches_and_tests_are_verified_by_the_clients_for_python_and_node(
    organization, alice, settings, tmp_path: Path, client: str
) -> None:
    settings.PRIVATE_WEBHOOKS = True
    types = [each for each in EVENT_TYPES if each.startswith(("fine_tuning.job.", "batch."))]
    got: list[Request] = []

    def answer(request: Request) -> Answer:
        got.append(request)
        return Answer(204, b"")

    with serve_http(answer) as url:
        endpoint, secret = endpoints.create_endpoint(
            organization=organization, url=f"{url}/hook", event_types=types, format="standard", by=alice.pk
        )
        for each in types:
            announce(organization=organization, type=each, subject=f"id of {each}", title=str, path="/", key=each)
        endpoints.send_test(endpoint=endpoint, by=alice.pk)
        endpoints.send_test(endpoint=endpoint, by=alice.pk, event_type="batch.completed")
        deliver_due(lane="control")
        deliver_due(lane="webhooks")
    sent = [{"body": request.body.decode(), "headers": dict(request.headers)} for request in got]
    deliveries = tmp_path / "deliveries.json"
    deliveries.write_text(json.dumps(sent))

    *by_node, refused = run_script("webhooks.mjs", client, secret, deliveries)
    verifier = openai.OpenAI(api_key="unused", webhook_secret=secret).webhooks
    events = [verifier.unwrap(each["body"], each["headers"]) for each in sent]

    wanted = [[each, f"id of {each}"] for each in types]
    wanted += [["webhook.test", endpoint.pk], ["batch.completed", endpoint.pk]]
    assert sorted(by_node) == sorted([event.type, event.data.id] for event in events) == sorted(wanted)
    assert refused == "InvalidWebhookSignatureError"


def in_chunks(address: str, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    """Send a body in chunks of a few bytes; return status and body of the answer."""

    def chunks() -> Iterator[bytes]:
        yield from (body[at : at + 7] for at in range(0, len(body), 7))

    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", path, chunks(), {"Transfer-Encoding": "chunked"} | names, encode_chunked=True)
    with connection.getresponse() as response:
        found = response.status, response.read().decode()
    connection.close()
    return found


def multipart(**fields: bytes) -> bytes:
    parts = {"purpose": b'name="purpose"\r\n\r\nfine-tune'} | {
        name: b'name="%s"; filename="a.jsonl"\r\n\r\n%b' % (name.encode(), content) for name, content in fields.items()
    }
    body = b"".join(b"--%b\r\nContent-Disposition: form-data; %b\r\n" % (BOUNDARY.encode(), p) for p in parts.values())
    return body + b"--%b--\r\n" % BOUNDARY.encode()


@pytest.mark.slow
def test_a_body_in_chunks_is_read_on_every_route(origin, organization, alice, client_for) -> None:  # noqa: F811
    key = {"authorization": f"Bearer {make_key(organization, alice).secret}"}
    as_form, as_json = f"multipart/form-data; boundary={BOUNDARY}", "application/json"
    announced = json.dumps({"bytes": len(jsonl()), "filename": "b.jsonl", "purpose": "fine-tune"}).encode()

    status, text = in_chunks(origin, "/v1/files", multipart(file=jsonl()), content_type=as_form, **key)
    assert (status, json.loads(text).get("bytes")) == (200, len(jsonl())), text
    status, text = in_chunks(origin, "/v1/uploads", announced, content_type=as_json, **key)
    assert status == 200, text
    parts = f"/v1/uploads/{json.loads(text)['id']}/parts"
    status, text = in_chunks(origin, parts, multipart(data=jsonl()), content_type=as_form, **key)
    assert status == 200, text
    status, text = in_chunks(origin, "/api/v1/estimates", b'{"model":"no-such"}', content_type=as_json, **key)
    assert (status, json.loads(text)["error"]["param"]) == (400, "training_file"), text
    status, text = in_chunks(origin, "/v1/fine_tuning/jobs", b"", content_type=as_json, **key)
    assert (status, json.loads(text)["error"]["param"]) == (400, "training_file"), text

    browser = client_for(alice)
    browser.get("/organization")
    cookies = {name: morsel.value for name, morsel in browser.cookies.items()}
    form = {"csrfmiddlewaretoken": cookies["csrftoken"], "theme": "dark"}
    headers = {"cookie": "; ".join(f"{n}={v}" for n, v in cookies.items()), "origin": origin}
    status, text = in_chunks(
        origin, "/theme", urlencode(form).encode(), content_type="application/x-www-form-urlencoded", **headers
    )
    assert status in (200, 204, 302), text


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("Content-Length: 2\r\nTransfer-Encoding: chunked", 400),
        ("Content-Length: 2\r\nContent-Length: 3", 400),
        ("Content-Length: -2", 400),
        ("Content-Length: two", 400),
        ("Transfer-Encoding: gzip, chunked", 401),
    ],
)
def test_a_length_that_contradicts_itself_is_refused(origin, head: str, status: int) -> None:  # noqa: F811
    connection = http.client.HTTPConnection(urlsplit(origin).netloc, timeout=60)
    connection.connect()
    assert connection.sock is not None
    request = f"POST /v1/uploads HTTP/1.1\r\nHost: {urlsplit(origin).netloc}\r\n{head}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n"
    connection.sock.sendall(request.encode())
    answer = connection.sock.recv(4096).decode()
    connection.close()
    assert answer.startswith(f"HTTP/1.1 {status} "), answer
