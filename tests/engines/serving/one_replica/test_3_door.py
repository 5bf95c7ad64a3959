"""The only way to the engine: two routes, one token, known models and fields."""

import json
import socket
from pathlib import Path

import pytest

from tests.support.engines.control_plane import REPLICA_TOKEN
from tests.support.engines.models import BASE_MODEL, SERVED_NAME, name_of
from tests.support.engines.replica import Replica
from tests.support.engines.world import GOOD, NAN, NOOP, OTHER, THIRD


@pytest.mark.parametrize("model", [None, "", 7, ["x"], {}])
def test_missing_or_empty_model_is_an_error_and_never_the_base(replica: Replica, model: object) -> None:
    for body in ({"model": model, "prompt": "Hi"}, {"prompt": "Hi"}):
        for route in ("/v1/completions", "/v1/chat/completions"):
            assert replica.http.post(route, json=body).status_code == 400


@pytest.mark.parametrize(
    "model",
    ["text", "image", "demo", str(BASE_MODEL), "b-other", NAN, NOOP, name_of("unknown"), GOOD + "\n", GOOD[:-1]],
)
def test_unknown_model_is_not_found_and_never_the_base(replica: Replica, model: str) -> None:
    answer = replica.complete(model)

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_adapter_named_like_a_modality_does_not_hijack_the_base_model(replica: Replica) -> None:
    parts = [{"type": "text", "text": "Hello"}]
    body = {"model": SERVED_NAME, "messages": [{"role": "user", "content": parts}], "max_tokens": 4}

    answer = replica.http.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200
    assert answer.json()["model"] == SERVED_NAME


DENIED = [
    ("GET", "/v1/models"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/adapters"),
    ("DELETE", f"/adapters/{GOOD}"),
    ("POST", "/invocations"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/generative_scoring"),
    ("POST", "/scale_elastic_ep"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/chat/completions/batch"),
    ("POST", "/v1/completions/render"),
    ("POST", "/inference/v1/generate"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/load"),
    ("GET", "/version"),
    ("GET", "/v1/completions"),
    ("POST", "//v1/completions"),
    ("POST", "/V1/completions"),
    ("POST", "/x/../v1/completions"),
    ("POST", "/v1/%63ompletions"),
    ("POST", "/v1/completions/"),
    ("POST", "/v1/completions?x=1"),
]


def test_nobody_else_on_the_machine_reaches_the_engine_past_the_door(replica: Replica) -> None:
    """Its socket is open to everybody: the folder is not."""
    assert replica.paths.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("token", ["with", "without"])
@pytest.mark.parametrize(("method", "path"), DENIED)
def test_every_other_route_is_not_found(replica: Replica, method: str, path: str, token: str) -> None:
    body = {"model": GOOD, "prompt": "Hi", "name": "x", "lora_name": GOOD, "src": "/tmp", "lora_path": "/tmp"}

    status = send_raw(replica.listen, method, path, body=body, has_token=token == "with")

    assert status == 404
    assert set(replica.list_loaded()) == {SERVED_NAME, GOOD, OTHER, THIRD}


def send_raw(socket_path: Path, method: str, path: str, *, body: dict[str, str], has_token: bool) -> int:
    """Send the path as it is written, which HTTP libraries do not; returns the status."""
    data = json.dumps(body).encode()
    token = f"Authorization: Bearer {REPLICA_TOKEN}\r\n" if has_token else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{token}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(socket_path))
        connection.sendall(head.encode() + data)
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize("credential", ["", "Bearer", "Bearer wrong", "Basic replica-token-of-this-test"])
def test_allowed_routes_need_the_replica_token(replica: Replica, credential: str) -> None:
    body = {"model": GOOD, "prompt": "Hi"}

    answer = replica.http.post("/v1/completions", json=body, headers={"Authorization": credential})

    assert answer.status_code == 401


def test_fields_outside_the_list_do_not_reach_the_engine(replica: Replica) -> None:
    answer = replica.complete(GOOD, prompt_logprobs=1, return_token_ids=True, priority=5, request_id="mine")

    assert answer.status_code == 200
    choice = answer.json()["choices"][0]
    assert choice.get("prompt_logprobs") is None and choice.get("token_ids") is None


def test_an_engine_of_a_model_that_writes_text_makes_no_embeddings(replica: Replica) -> None:
    """Why the gateway refuses them itself: the engine has no such route, and its 404 has no error object."""
    answer = replica.engine_http.post("/v1/embeddings", json={"model": SERVED_NAME, "input": "Hi"})

    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
