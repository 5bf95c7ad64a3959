"""An image passes the gateway and the replica's proxy into a vLLM with vision; image URLs are never fetched."""

import base64
import json
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from django.db import transaction

from apps.catalog.models import BaseModel
from tests.factories.serving import Tenant, make_replica, make_served_model, make_tenant
from tests.support.engines.control_plane import ControlPlane
from tests.support.engines.replica import Replica
from tests.support.gateway.processes import (  # noqa: F401 - fixtures
    ROOT,
    GatewayProcess,
    committed_database,
    error_of,
    no_transaction,
    running_gateway,
    usage_of,
    wait_for_usage,
    wait_until,
)
from tests.twins.http_server import Answer, Request, serve_http
from tests.twins.scripted_engine import TOKEN

pytestmark = [pytest.mark.nightly, pytest.mark.django_db]

ENGINES_PYTHON = str(ROOT / ".venv-engines" / "bin" / "python")
IMAGE_TOKENS = 8  # of seeing_model.py: four, three around them, and a line's end
LISTED_HOST = "127.0.0.1"  # at the engine; the gateway takes no addresses at all
RED, BLUE = (255, 0, 0), (0, 0, 255)


def make_png(color: tuple[int, int, int]) -> bytes:
    """Return a picture of one color."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    width = height = 40
    rows = (b"\0" + bytes(color) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class PictureHost(NamedTuple):
    """Serves pictures on loopback, and lists what is asked of it under any name."""

    port: int
    asked: list[str]


@pytest.fixture(scope="module")
def pictures() -> Iterator[PictureHost]:
    asked: list[str] = []

    def answer(request: Request) -> Answer:
        asked.append(request.path)
        if request.path == "/moved.png":
            return Answer(302, headers={"Location": f"http://{request.headers['Host']}/target.png"})
        return Answer(content=make_png(RED))

    with serve_http(answer) as url:
        yield PictureHost(urlsplit(url).port or 0, asked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    subprocess.run([ENGINES_PYTHON, "-m", "tests.e2e.seeing_model", str(folder)], cwd=ROOT, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def base_model(folder: Path, _database: None) -> BaseModel:
    return make_served_model("seeing", **json.loads((folder / "config.json").read_text()))


@pytest.fixture(scope="module")
def replica(folder: Path, base_model: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    plane = ControlPlane(base_model_path=str(folder), served_name=base_model.served_name)
    plane.enrollment = msgspec.structs.replace(plane.enrollment, replica_token=TOKEN)
    replica = Replica(
        tmp_path_factory.mktemp("replica"), plane, python=ENGINES_PYTHON, settings={"ANNEAL_MEDIA_HOSTS": LISTED_HOST}
    )
    try:
        replica.wait_until_ready()
        with transaction.atomic():
            make_replica(base_model, f"unix://{replica.listen}")
        yield replica
    finally:
        replica.stop()
        plane.close()


@pytest.fixture(scope="module")
def gateway(replica: Replica, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with running_gateway(tmp_path_factory.mktemp("gw"), engines=replica.listen.parent) as gateway:
        yield gateway


@pytest.fixture
def tenant(base_model: BaseModel, gateway: GatewayProcess) -> Iterator[Tenant]:
    yield make_tenant("Northline", base_model)
    gateway.close_clients()


def ask_with(url: str | None, model: str) -> dict[str, object]:
    """Return a request with one image, or with none."""
    parts = [{"type": "text", "text": "What is this?"}]
    if url is not None:
        parts.append({"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "user", "content": parts}]
    return {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0, "logprobs": True}


def as_data_url(color: tuple[int, int, int]) -> str:
    return f"data:image/png;base64,{base64.b64encode(make_png(color)).decode()}"


def test_an_image_is_seen_and_its_tokens_are_charged(gateway: GatewayProcess, tenant: Tenant) -> None:
    http = gateway.http(tenant.key)
    wait_until(lambda: http.post("/v1/chat/completions", json=ask_with(None, "seeing")).status_code == 200, "no answer")
    before = len(wait_for_usage(tenant, 1))

    answers = [
        http.post("/v1/chat/completions", json=ask_with(url, "seeing"), timeout=120)
        for url in (None, as_data_url(RED), as_data_url(BLUE), as_data_url(RED))
    ]

    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
    text, red, blue, again = [answer.json() for answer in answers]
    read = [body["usage"]["prompt_tokens"] for body in (red, blue, again)]
    assert read == [text["usage"]["prompt_tokens"] + IMAGE_TOKENS] * 3
    assert numbers_of(red) == numbers_of(again) != numbers_of(blue) != numbers_of(text)
    wait_for_usage(tenant, before + 4)
    assert sorted(event.input_tokens for event in usage_of(tenant))[-3:] == read


def numbers_of(body: dict) -> list[float]:
    return [round(token["logprob"], 4) for token in body["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://localhost/a.png", "must be an https:// URL with a host name"),
        ("https://example.org/a.png", "fetches nothing from example.org"),
        ("https://127.0.0.1/a.png", "must be an https:// URL with a host name"),
        ("http://localhost:{port}/a.png", "must be an https:// URL with a host name"),
        ("https://user@images.example.com/a.png", "must be an https:// URL with a host name"),
        ("file:///etc/passwd", "must be an https:// URL with a host name"),
        ("data:text/html;base64,aGk=", "must begin like"),
    ],
)
def test_the_gateway_refuses_every_other_url_before_anything_is_fetched(
    gateway: GatewayProcess, tenant: Tenant, pictures: PictureHost, url: str, says: str
) -> None:
    body, before = ask_with(url.format(port=pictures.port), "seeing"), list(pictures.asked)

    answer = gateway.http(tenant.key).post("/v1/chat/completions", json=body)

    assert (answer.status_code, error_of(answer)["param"]) == (400, "messages[0].content[1].image_url.url")
    assert says in error_of(answer)["message"]
    assert pictures.asked == before


def ask_engine(replica: Replica, url: str) -> httpx.Response:
    """Ask at the replica's door, past the gateway's rules."""
    return replica.http.post(
        "/v1/chat/completions", json=ask_with(url, replica.plane.enrollment.base_model["served_name"])
    )


def test_the_engine_itself_fetches_from_its_list_alone_and_follows_no_redirect(
    replica: Replica, pictures: PictureHost
) -> None:
    listed = ask_engine(replica, f"http://{LISTED_HOST}:{pictures.port}/listed.png")
    assert (listed.status_code, pictures.asked) == (200, ["/listed.png"]), listed.text

    moved = ask_engine(replica, f"http://{LISTED_HOST}:{pictures.port}/moved.png")
    assert moved.status_code >= 400 and pictures.asked == ["/listed.png", "/moved.png"]
    for host in ("localhost", "LOCALHOST", "127.1", "2130706433", "[::ffff:127.0.0.1]", f"{LISTED_HOST}@localhost"):
        answer = ask_engine(replica, f"http://{host}:{pictures.port}/other.png")
        assert answer.status_code >= 400, host
    for url in ("file:///etc/passwd", "ftp://127.0.0.1/a.png", f"http:\\\\localhost:{pictures.port}/other.png"):
        assert ask_engine(replica, url).status_code >= 400, url
    assert pictures.asked == ["/listed.png", "/moved.png"]
