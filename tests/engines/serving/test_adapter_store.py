"""Adapters are checked number by number before they come near an engine, and their folders never change."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from apps.contracts.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from apps.contracts.parity import PARITY_FILE
from apps.contracts.serving import DesiredAdapter
from gpu_workers.serving.adapters.store import AdapterRejected, AdapterStore, AdapterUnavailable, BaseIdentity
from tests.support.engines.adapters import Arrays, make_arrays, make_files
from tests.support.engines.control_plane import ControlPlane
from tests.support.engines.models import BASE_MODEL, SERVED_NAME

NAME = "a-" + "0" * 26
A_TENSOR = "base_model.model.model.layers.2.self_attn.v_proj.lora_A.weight"


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    plane = ControlPlane(base_model_path=str(BASE_MODEL), served_name=SERVED_NAME)
    yield plane
    plane.close()


@pytest.fixture
def base() -> BaseIdentity:
    return BaseIdentity(path=str(BASE_MODEL), served_name=SERVED_NAME, max_lora_rank=16)


@contextmanager
def open_object(url: str) -> Iterator[Iterator[bytes]]:
    with httpx.stream("GET", url, verify=False) as response:  # certificates would be read each time
        response.raise_for_status()
        yield response.iter_bytes()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    store = AdapterStore(tmp_path / "adapters", open_object)
    yield store
    store.collect_garbage([])


def test_good_files_become_a_read_only_folder_with_our_own_configuration(
    plane: ControlPlane, store: AdapterStore, base: BaseIdentity
) -> None:
    adapter = plane.describe(NAME, make_files(make_arrays(BASE_MODEL)))

    path = store.ensure(adapter, base)

    assert path.name.startswith("sha256-")
    assert sorted(p.name for p in path.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert path.stat().st_mode & 0o222 == 0
    assert json.loads((path / CONFIG_FILE).read_text())["base_model_name_or_path"] == "b-demo"


def _put(value: float, position: int = -1) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[A_TENSOR].flat[position] = value

    return change


def _prefix(arrays: Arrays) -> None:
    for name in list(arrays):
        arrays[name.replace("base_model.model.model.", "base_model.model.language_model.model.")] = arrays.pop(name)


def _shrink(arrays: Arrays) -> None:
    for name, array in arrays.items():
        arrays[name] = array[:, :128] if ".lora_A." in name and array.shape[1] == 256 else array


def _enlarge(arrays: Arrays) -> None:
    for array in arrays.values():
        array *= 300


@pytest.mark.parametrize(
    ("change", "config", "reason"),
    [
        (_put(np.nan), {}, "NaN or infinite"),
        (_put(np.inf, 0), {}, "NaN or infinite"),
        (_put(-np.inf, 7), {}, "NaN or infinite"),
        (_put(1e30), {}, "values above"),
        (_enlarge, {}, "changes weights by more than"),
        (_prefix, {}, "is missing"),
        (_shrink, {}, "has shape"),
        (lambda arrays: None, {"lora_alpha": 1e9}, "lora_alpha"),
        (lambda arrays: None, {"r": 4, "lora_alpha": 8}, "expected"),
        (lambda arrays: None, {"use_dora": True}, "use_dora"),
        (lambda arrays: None, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (lambda arrays: None, {"peft_type": "LOKR"}, "peft_type"),
        (lambda arrays: None, {"surprise": 1}, "surprise"),
    ],
)
def test_bad_adapter_is_rejected_with_its_reason(
    plane: ControlPlane,
    store: AdapterStore,
    base: BaseIdentity,
    change: Callable[[Arrays], None],
    config: dict[str, object],
    reason: str,
) -> None:
    arrays = make_arrays(BASE_MODEL)
    change(arrays)
    adapter = plane.describe(NAME, make_files(arrays, **config))

    with pytest.raises(AdapterRejected, match=reason):
        store.ensure(adapter, base)

    assert not store.get_path(adapter, base).exists()


def _with_files(adapter: DesiredAdapter, **changes: object) -> DesiredAdapter:
    files = tuple(
        msgspec.structs.replace(file, **changes) if file.name == WEIGHTS_FILE else file for file in adapter.files
    )
    return msgspec.structs.replace(adapter, files=files)


@pytest.mark.parametrize("changes", [{"sha256": "0" * 64}, {"bytes": 100}, {"url": "http://127.0.0.1:1/gone"}])
def test_files_that_arrive_otherwise_than_announced_are_not_kept(
    plane: ControlPlane, store: AdapterStore, base: BaseIdentity, changes: dict[str, object]
) -> None:
    adapter = _with_files(plane.describe(NAME, make_files(make_arrays(BASE_MODEL))), **changes)

    with pytest.raises(AdapterUnavailable):
        store.ensure(adapter, base)

    assert not store.get_path(adapter, base).exists()


def test_pickled_weights_are_not_even_downloaded(plane: ControlPlane, store: AdapterStore, base: BaseIdentity) -> None:
    files = make_files(make_arrays(BASE_MODEL))
    files["adapter_model.bin"] = files.pop(WEIGHTS_FILE)

    with pytest.raises(AdapterRejected, match="no adapter_model"):
        store.ensure(plane.describe(NAME, files), base)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, CONFIG_FILE, PARITY_FILE])
def test_files_above_the_size_limit_are_not_even_downloaded(
    plane: ControlPlane, store: AdapterStore, base: BaseIdentity, name: str
) -> None:
    adapter = plane.describe(NAME, make_files(make_arrays(BASE_MODEL)) | {PARITY_FILE: b"{}"})
    files = tuple(
        msgspec.structs.replace(file, bytes=5 * 2**30, url="http://127.0.0.1:1/x") if file.name == name else file
        for file in adapter.files
    )

    with pytest.raises(AdapterRejected, match="are allowed"):
        store.ensure(msgspec.structs.replace(adapter, files=files), base)


def test_a_certificate_lost_from_the_disk_is_fetched_anew(
    plane: ControlPlane, base: BaseIdentity, tmp_path: Path
) -> None:
    """Without its fixed rows an adapter would be served uncertified."""
    adapter = plane.describe(NAME, make_files(make_arrays(BASE_MODEL)) | {PARITY_FILE: b"{}"})
    path = AdapterStore(tmp_path / "adapters", open_object, limit_bytes=2**30).ensure(adapter, base)
    path.chmod(0o700)
    (path / PARITY_FILE).unlink()

    AdapterStore(tmp_path / "adapters", open_object, limit_bytes=2**30).ensure(adapter, base)

    assert (path / PARITY_FILE).read_bytes() == b"{}"


def test_damage_on_the_disk_is_mended_in_place_by_the_next_agent(
    plane: ControlPlane, store: AdapterStore, base: BaseIdentity, tmp_path: Path
) -> None:
    adapter = plane.describe(NAME, make_files(make_arrays(BASE_MODEL)))
    path = store.ensure(adapter, base)
    weights = path / WEIGHTS_FILE
    good = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(b"broken")

    again = AdapterStore(tmp_path / "adapters", open_object).ensure(adapter, base)

    assert again == path
    assert weights.read_bytes() == good


def test_peft_s_own_files_are_accepted(
    plane: ControlPlane, store: AdapterStore, base: BaseIdentity, tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(BASE_MODEL)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=16, lora_alpha=32, target_modules=modules, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(tmp_path / "peft")
    files = {name: (tmp_path / "peft" / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}

    assert store.ensure(plane.describe(NAME, files, rank=16), base).exists()


def _adapter(plane: ControlPlane, number: int) -> DesiredAdapter:
    return plane.describe(f"a-{number:026d}", make_files(make_arrays(BASE_MODEL, seed=number)))


def test_above_its_limit_the_cache_gives_up_what_was_used_longest_ago_but_nothing_an_engine_may_read(
    plane: ControlPlane, base: BaseIdentity, tmp_path: Path
) -> None:
    adapters = [_adapter(plane, number) for number in range(4)]
    size = sum(file.bytes for file in adapters[0].files)
    store = AdapterStore(tmp_path / "adapters", open_object, limit_bytes=2 * size + size // 2)
    first, second, third = (store.ensure(adapter, base) for adapter in adapters[:3])
    assert first.exists() and second.exists() and third.exists()  # all given out: the limit gives way

    store.give_back([first, second])
    os.utime(first)
    store.ensure(adapters[3], base)

    assert (first.exists(), second.exists(), third.exists()) == (False, False, True)
    assert store.count_bytes() < 3 * size
    store.give_back([third])
    assert store.ensure(adapters[2], base) == third
    store.collect_garbage([])


def test_a_cached_folder_whose_weights_changed_is_fetched_anew(
    plane: ControlPlane, base: BaseIdentity, tmp_path: Path
) -> None:
    adapter = _adapter(plane, 1)
    path = AdapterStore(tmp_path / "adapters", open_object, limit_bytes=2**30).ensure(adapter, base)
    good = (path / WEIGHTS_FILE).read_bytes()
    (path / WEIGHTS_FILE).chmod(0o600)
    (path / WEIGHTS_FILE).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))

    AdapterStore(tmp_path / "adapters", open_object, limit_bytes=2**30).ensure(adapter, base)

    assert (path / WEIGHTS_FILE).read_bytes() == good
