import hashlib
from pathlib import Path

import httpx
import msgspec
import pytest

from apps.contracts.runs import Manifest, SignedFile
from apps.contracts.worker_api import UploadResponse
from gpu_workers.common.artifacts import BrokenArtifact, seal_folder, verify_folder
from gpu_workers.common.transfers import Interrupted, StoreUnavailable, Transfers
from gpu_workers.trainer.reporter import Uploader

CONTENT = b"weights" * 1000
SIGNED = SignedFile(
    name="a.bin",
    url="http://store/a.bin?signature=secret",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    bytes=len(CONTENT),
)


def make_transfers(answer, **options) -> Transfers:
    return Transfers(transport=httpx.MockTransport(answer), sleep=lambda seconds: None, **options)


def sign(signed_at: float = 0.0) -> UploadResponse:
    names = ("a.bin", "b.json", "manifest.json")
    return UploadResponse(upload_id="up_1", files={name: f"http://store/{name}?at={signed_at}" for name in names})


def seal(tmp_path: Path) -> tuple[Path, str]:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "a.bin").write_bytes(CONTENT)
    (draft / "b.json").write_text("{}")
    final = tmp_path / "final"
    digest = seal_folder(
        draft, final, lambda files: Manifest(kind="adapter", run_id="run_1", attempt=1, step=3, files=files)
    )
    return final, digest


def test_a_sealed_folder_verifies_and_leaves_no_draft(tmp_path):
    folder, digest = seal(tmp_path)

    manifest = verify_folder(folder, manifest_sha256=digest)

    assert [file.name for file in manifest.files] == ["a.bin", "b.json"]
    assert not (tmp_path / "draft").exists()
    assert not list(folder.glob("*.tmp"))


def test_another_manifest_than_the_registered_one_is_refused(tmp_path):
    folder, _ = seal(tmp_path)

    with pytest.raises(BrokenArtifact, match="not the one"):
        verify_folder(folder, manifest_sha256="0" * 64)


def test_a_download_appears_only_when_it_is_whole(tmp_path):
    cut = make_transfers(lambda request: httpx.Response(200, content=CONTENT[:-1]))

    with pytest.raises(BrokenArtifact):
        cut.download(SIGNED, tmp_path / "a.bin")

    assert not (tmp_path / "a.bin").exists()


def test_a_download_longer_than_registered_is_cut_short(tmp_path):
    endless = make_transfers(lambda request: httpx.Response(200, content=CONTENT * 100))

    with pytest.raises(BrokenArtifact, match="longer"):
        endless.download(SIGNED, tmp_path / "a.bin")

    assert not (tmp_path / "a.bin").exists()


def test_a_file_that_is_already_there_is_not_fetched_again(tmp_path):
    (tmp_path / "a.bin").write_bytes(CONTENT)

    make_transfers(lambda request: httpx.Response(500)).download(SIGNED, tmp_path / "a.bin")


def test_a_store_in_trouble_is_tried_again(tmp_path):
    answers = iter([httpx.Response(503), httpx.Response(500), httpx.Response(200, content=CONTENT)])

    make_transfers(lambda request: next(answers)).download(SIGNED, tmp_path / "a.bin")

    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_refusal_of_the_store_is_final_and_tells_no_url(tmp_path):
    calls = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(403)

    with pytest.raises(StoreUnavailable) as failure:
        make_transfers(answer).download(SIGNED, tmp_path / "a.bin")

    assert len(calls) == 1
    assert "secret" not in str(failure.value)


def test_an_upload_announces_its_length_and_ends_with_the_manifest(tmp_path):
    folder, _ = seal(tmp_path)
    puts = []

    def answer(request: httpx.Request) -> httpx.Response:
        puts.append((request.url.path, int(request.headers["Content-Length"]), len(request.read())))
        return httpx.Response(200)

    make_transfers(answer).upload_folder(folder, sign)

    assert [path for path, _, _ in puts] == ["/a.bin", "/b.json", "/manifest.json"]
    assert all(announced == sent for _, announced, sent in puts)


def test_a_large_file_is_sent_in_parts_each_of_which_is_repeated_alone(tmp_path):
    folder, _ = seal(tmp_path)
    stored, tries = {}, []
    whole = sign()
    parts = tuple(f"http://store/parts/{number}" for number in range(3))
    places = msgspec.structs.replace(whole, parts={"a.bin": parts}, part_bytes=3000)

    def answer(request: httpx.Request) -> httpx.Response:
        tries.append(request.url.path)
        if tries.count("/parts/1") == 1 and request.url.path == "/parts/1":
            return httpx.Response(503)
        stored[request.url.path] = request.read()
        assert int(request.headers["Content-Length"]) == len(stored[request.url.path])
        return httpx.Response(200)

    make_transfers(answer).upload_folder(folder, lambda: places)

    assert tries == ["/parts/0", "/parts/1", "/parts/1", "/parts/2", "/b.json", "/manifest.json"]
    assert [len(stored[f"/parts/{number}"]) for number in range(3)] == [3000, 3000, 1000]
    assert b"".join(stored[f"/parts/{number}"] for number in range(3)) == CONTENT
    tries.clear()
    make_transfers(answer).upload_folder(folder, lambda: msgspec.structs.replace(places, parts={"a.bin": ()}))
    assert tries == ["/b.json", "/manifest.json"], "joined parts are not sent again"


def test_an_upload_replaces_nothing_and_what_is_there_already_is_left(tmp_path):
    folder, _ = seal(tmp_path)
    there = {}

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["If-None-Match"] == "*"
        if request.url.path in there:
            return httpx.Response(412)
        there[request.url.path] = request.read()
        return httpx.Response(503 if len(there) == 1 else 200)  # stored, and then the answer is lost

    make_transfers(answer).upload_folder(folder, sign)

    assert sorted(there) == ["/a.bin", "/b.json", "/manifest.json"]


class Clocked:
    """A control plane and its store, where each file takes ten minutes and a URL lasts for fifteen."""

    def __init__(self, lasts_seconds: float = 900.0) -> None:
        self.now, self.signatures, self.there, self.lasts_seconds = 0.0, 0, [], lasts_seconds

    def create_upload(self, lease, request) -> UploadResponse:
        self.signatures += 1
        return sign(self.now)

    def put(self, request: httpx.Request) -> httpx.Response:
        if float(request.url.params["at"]) + self.lasts_seconds <= self.now:
            return httpx.Response(403)
        self.now += 600.0
        self.there.append(request.url.path)
        return httpx.Response(200)


def test_an_upload_may_take_longer_than_its_urls_last(tmp_path):
    (folder, digest), store = seal(tmp_path), Clocked()

    Uploader(store, None, make_transfers(store.put)).store(folder, digest)

    assert (store.there, store.signatures) == (["/a.bin", "/b.json", "/manifest.json"], 2)


def test_a_new_url_that_is_refused_at_once_ends_the_upload(tmp_path):
    (folder, digest), store = seal(tmp_path), Clocked(lasts_seconds=0.0)

    with pytest.raises(StoreUnavailable, match="403"):
        Uploader(store, None, make_transfers(store.put)).store(folder, digest)

    assert (store.there, store.signatures) == ([], 2)


def test_a_transfer_stops_when_the_lease_is_lost(tmp_path):
    folder, _ = seal(tmp_path)

    with pytest.raises(Interrupted):
        make_transfers(lambda request: httpx.Response(200), should_stop=lambda: True).upload_folder(folder, sign)
