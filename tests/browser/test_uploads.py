"""A large file from a browser: in parts, through a server that dies, and over a reload."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
import uvicorn
from moto.server import ThreadedMotoServer
from playwright.sync_api import Page, Request, Route, expect

from apps.accounts.models import User
from apps.config.settings.base import store_origins
from apps.core.http.asgi import DjangoApplication
from apps.core.objects.store import open_store, read_object
from apps.datasets.intake import parts, uploads
from apps.datasets.models import DatasetVersion, Upload
from apps.interfaces.web.datasets import views
from tests.factories.accounts import make_organization, make_user
from tests.factories.catalog import make_base_model
from tests.factories.datasets import jsonl
from tests.support.asgi import StaticFiles
from tests.support.browser import DRAWN, wait_on, wait_until

Open = Callable[..., Page]
PART = 16 * 1024
LANES = 3  # parts that the page sends at once
CONTENT = jsonl(1_500)


@pytest.fixture
def alice(transactional_db: None) -> User:
    alice = make_user("alice")
    make_organization("Acme", owner=alice)
    make_base_model()
    return alice


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, server_url: str, settings) -> None:
    monkeypatch.setattr(uploads, "BROWSER_PART_BYTES", PART)
    monkeypatch.setattr(views, "IN_PARTS_FROM_BYTES", PART)
    settings.PUBLIC_URL = server_url


class Server:
    """The web application on a port of its own, which can die and come back."""

    def __init__(self, port: int = 0) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(100)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            StaticFiles(DjangoApplication()), log_level="critical", lifespan="off", timeout_graceful_shutdown=0
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        wait_until(lambda: self._server.started)

    def kill(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=60)


@pytest.fixture
def server(alice: User) -> Iterator[list[Server]]:
    running = [Server()]
    yield running
    running[-1].kill()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "large.jsonl"
    file.write_bytes(CONTENT)
    return file


def test_a_large_file_goes_in_parts_and_a_reload_resumes_it(open_page: Open, alice: User, file: Path) -> None:
    page = open_page("/datasets/upload", user=alice, is_fresh=True)
    page.route("**/objects/**/p00005*", lambda route: None)  # never answered: this part hangs
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Upload").click()
    _wait_for_parts(page, 4)

    page.reload()  # before the route goes: that would let the part arrive, and the upload be complete
    page.unroute_all(behavior="ignoreErrors")
    expect(page.get_by_text("large.jsonl stopped at")).to_be_visible()
    sent: list[str] = []
    page.on("request", lambda request: _note_part(request, sent))
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Upload").click()

    expect(page.get_by_text("checking the file line by line")).to_be_visible(timeout=240_000)
    version = DatasetVersion.objects.get()
    assert read_object(version.object_key) == CONTENT
    assert Upload.objects.count() == 1, "the reload went on with the upload that was begun"
    assert len(set(sent)) < parts.count_parts(Upload.objects.get()), "what had arrived was not sent again"


def _wait_for_parts(page: Page, count: int) -> None:
    def is_there() -> bool:
        upload = Upload.objects.first()
        return upload is not None and len(parts.list_present(upload=upload)) >= count

    wait_on(page, is_there)


def _note_part(request: Request, sent: list[str]) -> None:
    if request.method == "PUT":
        sent.append(request.url.split("?")[0])


@pytest.mark.slow
def test_the_same_file_with_another_name_becomes_a_dataset_of_its_own(open_page: Open, alice: User, file: Path) -> None:
    page = open_page("/datasets/upload", user=alice, is_fresh=True)
    page.route("**/objects/**/p00005*", lambda route: None)  # never answered: this part hangs
    for name in ("first", "second"):
        page.set_input_files("input[type=file]", file)
        page.locator("input[name=name]").fill(name)
        page.get_by_role("button", name="Upload").click()
        wait_on(page, lambda name=name: Upload.objects.filter(dataset_name=name).exists())
        page.reload()
    page.unroute_all(behavior="ignoreErrors")
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Upload").click()

    expect(page.get_by_text("checking the file line by line")).to_be_visible(timeout=240_000)
    assert DatasetVersion.objects.get().dataset.name == "second", "without a name, the newest goes on"
    assert Upload.objects.count() == 2


@pytest.mark.slow
def test_a_large_file_can_be_paused_and_goes_on_after_it(open_page: Open, alice: User, file: Path) -> None:
    page = open_page("/datasets/upload", user=alice, is_fresh=True)
    sent: list[str] = []
    page.on("request", lambda request: _note_part(request, sent))
    page.route("**/objects/**/p00005*", lambda route: None)  # never answered: this part hangs
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Upload").click()
    _wait_for_parts(page, 4)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("saved")).to_be_visible()
    page.wait_for_timeout(300)  # what was under way has ended: nothing more is sent
    before = len(sent)
    page.wait_for_timeout(700)
    assert len(sent) == before
    expect(page.get_by_text("saved")).to_be_visible()

    page.reload()  # a pause outlives the page; its message disappears when the upload continues
    expect(page.get_by_text("large.jsonl stopped at")).to_be_visible()
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Upload").click()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("saved")).to_be_visible()
    expect(page.get_by_text("large.jsonl stopped at")).to_be_hidden()
    page.unroute_all(behavior="ignoreErrors")
    page.get_by_role("button", name="Resume").click()

    expect(page.get_by_text("checking the file line by line")).to_be_visible(timeout=240_000)
    assert read_object(DatasetVersion.objects.get().object_key) == CONTENT


@pytest.mark.slow
def test_a_part_being_signed_when_its_file_is_paused_waits_for_it_to_go_on(
    open_page: Open, alice: User, file: Path
) -> None:
    page = open_page("/datasets/upload", user=alice, is_fresh=True)
    sent: list[str] = []
    held: list[Route] = []
    page.on("request", lambda request: _note_part(request, sent))
    page.route("**/sign", lambda route: held.append(route) if len(held) < LANES else route.continue_())
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Upload").click()
    wait_on(page, lambda: len(held) == LANES)
    page.get_by_role("button", name="Pause").click()
    with page.expect_response("**/sign"):
        for route in held:
            route.continue_()
    page.wait_for_timeout(500)  # in which nothing is sent
    assert sent == []

    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("checking the file line by line")).to_be_visible(timeout=240_000)
    assert read_object(DatasetVersion.objects.get().object_key) == CONTENT


def test_a_file_sent_twice_at_once_is_uploaded_once(open_page: Open, alice: User, file: Path) -> None:
    page = open_page("/datasets/upload", user=alice, is_fresh=True)
    page.set_input_files("input[type=file]", file)
    page.locator("input[name=name]").focus()
    for _ in range(2):
        page.keyboard.press("Control+Enter")

    expect(page.get_by_text("checking the file line by line")).to_be_visible(timeout=240_000)
    assert Upload.objects.count() == 1


@pytest.mark.slow
# Django spools each request's body; a server that dies leaves some to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*SpooledTemporaryFile:pytest.PytestUnraisableExceptionWarning")
def test_an_upload_outlives_the_server_it_began_on(
    open_page: Open, alice: User, server: list[Server], file: Path, settings
) -> None:
    port = server[0].port
    settings.PUBLIC_URL = f"http://127.0.0.1:{port}"
    page = open_page("/datasets/upload", user=alice, is_fresh=True)
    page.goto(f"http://127.0.0.1:{port}/datasets/upload")  # cookies belong to the host, not to a port
    held: list[Route] = []
    page.route("**/objects/**/p00006*", lambda route: held.append(route))
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Upload").click()
    _wait_for_parts(page, 4)
    wait_on(page, lambda: bool(held))

    server[0].kill()
    held.pop().abort()
    page.unroute("**/objects/**/p00006*")
    server.append(Server(port))

    expect(page.get_by_text("checking the file line by line")).to_be_visible(timeout=240_000)
    assert read_object(DatasetVersion.objects.get().object_key) == CONTENT
    page.close()  # it would go on asking the server that is about to end
    open_page.complaints.clear()  # type: ignore[attr-defined] - requests refused meanwhile are what this is about


@pytest.fixture
def bucket(settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server as the installation's store; its origin."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    origin = "http://{}:{}".format(*server.get_host_and_port())
    boto3.client("s3", endpoint_url=origin, region_name="us-east-1").create_bucket(Bucket="uploads")
    settings.OBJECT_STORE = f"s3://uploads?endpoint={origin}"
    directives = settings.CONTENT_SECURITY_POLICY["DIRECTIVES"]
    connect = ["'self'", *store_origins(settings.OBJECT_STORE)]
    settings.CONTENT_SECURITY_POLICY = {"DIRECTIVES": directives | {"connect-src": connect}}
    open_store.cache_clear()
    yield origin
    open_store.cache_clear()
    server.stop()


@pytest.mark.slow
def test_parts_go_straight_to_a_bucket_by_presigned_addresses_and_resume_there(
    open_page: Open, alice: User, file: Path, bucket: str
) -> None:
    page = open_page("/datasets/upload", user=alice, is_fresh=True)
    held: list[Route] = []
    page.route(re.compile("p00005"), lambda route: held.append(route))
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Upload").click()
    _wait_for_parts(page, 4)
    wait_on(page, lambda: len(held) == 1)

    asked: list[Route] = []
    page.route("**/datasets/uploads/*", lambda route: asked.append(route) if not asked else route.continue_())
    page.reload()
    wait_on(page, lambda: bool(asked))
    sent: list[str] = []
    page.on("request", lambda request: _note_part(request, sent))
    page.set_input_files("input[type=file]", file)
    page.get_by_role("button", name="Upload").click()
    wait_on(page, lambda: len(held) == 2)
    with page.expect_response(asked[0].request.url):
        asked[0].continue_()  # what the page asked as it came tells nothing any more
    page.evaluate(DRAWN)
    expect(page.get_by_text("large.jsonl stopped at")).to_be_hidden()
    held[1].continue_()

    expect(page.get_by_text("checking the file line by line")).to_be_visible(timeout=240_000)
    assert read_object(DatasetVersion.objects.get().object_key) == CONTENT
    assert sent and all(address.startswith(f"{bucket}/uploads/org/") for address in sent)
    assert len(set(sent)) < parts.count_parts(Upload.objects.get()), "what had arrived was not sent again"
