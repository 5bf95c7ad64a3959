"""The files of a whole model on the machine that serves it alone: only what was meant, whole, or not at all."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from apps.contracts.runs import SignedFile
from apps.contracts.serving import DesiredState, ObservedState
from apps.contracts.worker_api import EnrollResponse
from gpu_workers.common.api_client import Unavailable
from gpu_workers.common.downloads import Unfetchable
from gpu_workers.engine.state import EnginePaths
from gpu_workers.serving.whole_model import fetch_model, wait_for_model, withdraw_model

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 100, "tokenizer.json": b"[]"}


class Store:
    """Signed URLs and what they open; every opening is remembered."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.contents = dict(files)
        self.opened: list[str] = []
        self.files = tuple(
            SignedFile(name=name, url=name, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
            for name, data in files.items()
        )

    @contextmanager
    def open(self, url: str) -> Iterator[Iterator[bytes]]:
        self.opened.append(url)
        yield iter([self.contents[url][:5], self.contents[url][5:]])


def test_the_folder_holds_the_files_read_only_and_a_second_start_fetches_nothing(tmp_path: Path) -> None:
    store = Store(FILES)

    path = fetch_model(store.files, tmp_path, store.open)
    store.opened.clear()
    again = fetch_model(store.files, tmp_path, store.open)

    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    assert (again, store.opened) == (path, [])
    assert path.stat().st_mode & 0o777 == 0o555
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o444}


def test_code_and_names_of_other_places_are_not_fetched(tmp_path: Path) -> None:
    store = Store(
        FILES | {"modeling_evil.py": b"x", "../out.json": b"x", "pytorch_model.bin": b"x", "sub/a.json": b"x"}
    )

    path = fetch_model(store.files, tmp_path, store.open)

    assert {file.name for file in path.iterdir()} == set(FILES)
    assert set(store.opened) == set(FILES)


def test_a_damaged_file_is_refused_and_only_it_is_fetched_again(tmp_path: Path) -> None:
    store = Store(FILES)
    store.contents["tokenizer.json"] = b"[]]]"
    with pytest.raises(Unfetchable, match=r"tokenizer\.json arrived damaged"):
        fetch_model(store.files, tmp_path, store.open)
    store.contents["tokenizer.json"] = FILES["tokenizer.json"]
    store.opened.clear()

    path = fetch_model(store.files, tmp_path, store.open)

    assert store.opened == ["tokenizer.json"]
    assert {file.name for file in path.iterdir()} == set(FILES)


def test_weights_changed_on_the_disk_are_not_served(tmp_path: Path) -> None:
    store = Store(FILES)
    weights = fetch_model(store.files, tmp_path, store.open) / "model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(b"W" + FILES["model.safetensors"][1:])

    path = fetch_model(store.files, tmp_path, store.open)

    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_another_model_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    old, new = Store(FILES), Store(FILES | {"model.safetensors": b"other"})
    fetch_model(old.files, tmp_path, old.open)

    path = fetch_model(new.files, tmp_path, new.open)

    assert list(tmp_path.iterdir()) == [path]


class Plane:
    """Answers as scripted, and remembers what it was told."""

    def __init__(self, *answers: DesiredState | Exception) -> None:
        self.answers = list(answers)
        self.said: list[ObservedState] = []

    def get_desired_state(self, replica_id: str, *, known_generation: int | None = None) -> DesiredState:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def report_observed_state(self, state: ObservedState) -> None:
        self.said.append(state)


def test_the_control_plane_hears_why_the_engine_has_not_started(tmp_path: Path) -> None:
    store = Store(FILES)
    named = {"id": "adpv_1", "name": "ft:x", "served_name": "b-own"}
    enrollment = EnrollResponse(
        worker_id="w", credential="c", pool="cpu", replica_id="rep_1", base_model=named, is_whole_model=True
    )
    wish = DesiredState(
        replica_id="rep_1", base_lora_served_name="b-own", base_model_sha256="", generation=3, adapters=(),
        model_files=store.files,
    )  # fmt: skip
    gone = DesiredState(
        replica_id="rep_1", base_lora_served_name="b-own", base_model_sha256="", generation=2, adapters=(),
        is_withdrawn=True,
    )  # fmt: skip
    plane = Plane(gone, Unavailable("no"), wish)

    base = wait_for_model(
        enrollment, tmp_path, api=plane, open_object=store.open, url="unix:///x", sleep=lambda _: None
    )  # fmt: skip

    assert (base.served_name, base.has_adapters) == ("b-own", False)
    assert Path(base.path or "").parent == tmp_path
    reasons = [state.reason for state in plane.said]
    assert reasons[0] == "its model was deleted"
    assert reasons[-1] == "downloading the model"
    assert not any(state.is_ready for state in plane.said)


def test_a_withdrawn_model_leaves_nothing_to_serve(tmp_path: Path) -> None:
    store = Store(FILES)
    fetch_model(store.files, tmp_path / "models", store.open)
    paths = EnginePaths(tmp_path)
    paths.replica.write_text("{}")

    withdraw_model(paths, tmp_path / "models")

    assert list((tmp_path / "models").iterdir()) == []
    assert not paths.replica.exists()
