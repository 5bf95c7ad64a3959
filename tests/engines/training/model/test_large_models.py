"""What follows training needs the memory of a part of the base model, however large it is."""

import ctypes
import gc
import itertools
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from apps.contracts.adapter_files import ALL_LINEAR
from apps.contracts.evaluation import EvaluationPlan
from apps.contracts.hyperparameters import Method
from apps.contracts.parity import PARITY_FILE, ParityProbe
from apps.contracts.runs import Manifest
from apps.estimates.physics.states import reading_bytes
from gpu_workers.common.artifacts import seal_folder
from gpu_workers.train.after import examination
from gpu_workers.train.after.merge import merge_adapter
from gpu_workers.train.after.publish import make
from gpu_workers.train.model.streamed import NotStreamable, StreamedModel
from gpu_workers.train.model.tensor_files import Entry, list_tensors, read_tensor, write_tensors
from gpu_workers.trainer.publication import Made, PublishSecrets
from tests.support.engines.adapters import make_arrays, make_files
from tests.support.engines.attempts import make_run_spec, prepare
from tests.support.engines.models import BASE_MODEL
from tests.support.engines.rows import SMALL, make_rows, unlike

_MIB = 2**20
_M_MMAP_THRESHOLD = -3  # of malloc.h
TOLERANCE = 0.05  # nats a token, of a parity certificate


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """180 MiB in shards of up to 90: twelve layers, each a fifteenth of it."""
    folder = tmp_path_factory.mktemp("models") / "large"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=6144,
        hidden_size=640,
        intermediate_size=2560,
        num_hidden_layers=12,
        num_attention_heads=10,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="90MB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE_MODEL / name, folder / name)
    return folder


class Merged(NamedTuple):
    """The large model with an adapter merged into it, and the peak growth of memory meanwhile."""

    folder: Path
    adapter: Path
    peak: int


@pytest.fixture(scope="module")
def merged(large_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Merged:
    folder = tmp_path_factory.mktemp("merging")
    adapter = write_adapter(large_model, folder / "adapter")
    peak = peak_of(lambda: merge_adapter(large_model, adapter, folder / "merged"), model=large_model)
    return Merged(folder / "merged", adapter, peak)


def write_adapter(model: Path, folder: Path) -> Path:
    folder.mkdir()
    for name, content in make_files(make_arrays(model, size=0.05)).items():
        (folder / name).write_bytes(content)
    return folder


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def peak_of(work: Callable[[], None], *, model: Path) -> int:
    """Return the peak growth of memory during `work`, in bytes, sampled every few milliseconds.

    It is anonymous memory and what is mapped of the model's files. Other mapped files are left out: the kernel takes
    their pages away and brings them back at any time. Freed memory is given back, before and meanwhile: growth into it
    would not show, and malloc keeps more or less of it by what was freed before.
    """
    gc.collect()
    malloc = ctypes.CDLL(None)
    malloc.mallopt(_M_MMAP_THRESHOLD, _MIB)  # a fixed one: free a tensor and its pages are gone
    malloc.malloc_trim(0)
    before = memory(model)
    found, is_over = [before], threading.Event()

    def sample() -> None:
        while not is_over.wait(0.002):
            found.append(memory(model))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        work()
    finally:
        is_over.set()
        sampler.join()
    return max(found) - before


def memory(model: Path) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    if str(model) in Path("/proc/self/maps").read_text():
        of_model = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.partition(" ")[0]:  # a mapping begins: its range of addresses
                of_model = str(model) in line
            elif of_model and line.startswith("Rss:"):
                kib += int(line.split()[1])
    return kib * 1024


@pytest.mark.slow
def test_a_merge_needs_the_memory_of_two_tensors_as_estimated_and_not_of_a_shard(large_model, merged):
    shards = sorted(large_model.glob("*.safetensors"))
    assert len(shards) > 1 and weight_bytes(large_model) > 150 * _MIB

    largest = max(entry.bytes for shard in shards for entry in list_tensors(shard))
    assert merged.peak < reading_bytes(largest) < weight_bytes(large_model) / 3
    assert weight_bytes(merged.folder) == pytest.approx(weight_bytes(large_model), rel=1e-3)


@pytest.mark.slow
def test_a_merged_shard_is_what_the_library_would_have_written(large_model, merged):
    weights = load_file(merged.adapter / "adapter_model.safetensors")
    scale = 2.0  # alpha by rank
    for shard in large_model.glob("*.safetensors"):
        before, after = load_file(shard), load_file(merged.folder / shard.name)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            module = "base_model.model." + name.removesuffix(".weight")
            down = weights.get(f"{module}.lora_A.weight")
            if down is None:
                assert torch.equal(after[name], tensor)
                continue
            up = weights[f"{module}.lora_B.weight"]
            expected = (tensor.float() + scale * (up.float() @ down.float())).to(torch.bfloat16)
            assert torch.allclose(after[name].float(), expected.float(), rtol=1e-2, atol=1e-4)


@pytest.fixture
def examined(tmp_path: Path) -> Callable[..., Made]:
    """Examine an adapter of a model on a machine with so much free memory, in a separate folder."""
    runs = itertools.count()

    def examine_with(
        model: Path, monkeypatch: pytest.MonkeyPatch, *, free_bytes: int, method: Method = Method.LORA
    ) -> Made:
        monkeypatch.setattr(examination, "free_bytes", lambda: free_bytes)
        work_dir = tmp_path / f"run{next(runs)}"
        work_dir.mkdir()
        prepare(work_dir, make_rows(2), validation=unlike(make_rows(1, seed=1)))
        seal_folder(
            write_adapter(model, work_dir / "tmp-adapter"),
            work_dir / "adapter",
            lambda files: Manifest(kind="adapter", run_id="run_1", attempt=1, step=5, files=files),
        )
        recipe = msgspec.structs.replace(SMALL, method=method, lora_rank=8, target_modules=ALL_LINEAR)
        plan = EvaluationPlan(max_answers=1, max_answer_tokens=4)
        spec = make_run_spec(model, recipe, has_validation=True, evaluation=plan)
        made = make(work_dir, spec, PublishSecrets())
        assert made.problem == ""
        sealed = msgspec.structs.replace(made.sealed, folder=str(work_dir / "published"))
        return msgspec.structs.replace(made, sealed=sealed)

    return examine_with


def probe_of(made: Made) -> ParityProbe:
    return msgspec.json.decode((Path(made.sealed.folder) / PARITY_FILE).read_bytes(), type=ParityProbe)


@pytest.mark.slow
def test_a_model_larger_than_the_memory_gets_the_probe_that_it_would_get_dense(examined, large_model, monkeypatch):
    dense = examined(large_model, monkeypatch, free_bytes=10**12)
    made = []
    peak = peak_of(lambda: made.append(examined(large_model, monkeypatch, free_bytes=0)), model=large_model)

    [streamed] = made
    assert peak < weight_bytes(large_model) / 2
    probe, expected = probe_of(streamed), probe_of(dense)
    assert [row.token_ids for row in probe.rows] == [row.token_ids for row in expected.rows]
    for row, same in zip(probe.rows, expected.rows, strict=True):
        assert mean_difference(row.base, same.base) < TOLERANCE / 2
        assert mean_difference(row.tuned, same.tuned) < TOLERANCE / 2
        assert mean_difference(row.tuned, row.base) > TOLERANCE
    found, exact = streamed.report.comparisons, dense.report.comparisons
    assert [each.name for each in found] == ["loss", "token_accuracy"]  # answers would need a pass for each token
    assert found[0].tuned.value == pytest.approx(exact[0].tuned.value, rel=0.01)
    assert "does not fit into this machine" in streamed.report.notes[0]


def test_a_qlora_run_is_compared_on_the_4_bit_base_and_certified_on_the_16_bit_one(examined, tiny_model, monkeypatch):
    dense = examined(tiny_model, monkeypatch, free_bytes=10**12, method=Method.QLORA)

    quantized = examined(tiny_model, monkeypatch, free_bytes=weight_bytes(tiny_model), method=Method.QLORA)

    assert [each.name for each in quantized.report.comparisons] == ["loss", "token_accuracy", "exact_match"]
    assert "4-bit base model that was trained" in quantized.report.notes[0]
    for row, same in zip(probe_of(quantized).rows, probe_of(dense).rows, strict=True):
        assert mean_difference(row.tuned, same.tuned) < TOLERANCE / 2


@pytest.mark.slow
def test_weights_under_other_names_are_refused_in_words(large_model, tmp_path):
    shutil.copytree(large_model, tmp_path / "other")
    for file in (tmp_path / "other").glob("*.safetensors"):
        save_file({f"renamed.{name}": tensor for name, tensor in load_file(file).items()}, file)

    with pytest.raises(NotStreamable, match="hold no model"):
        StreamedModel(tmp_path / "other", dtype=torch.bfloat16, device=torch.device("cpu"))


def mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def test_tensors_are_read_and_written_as_they_are(tmp_path):
    tensors = {
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "matrix": torch.randn(3, 5, dtype=torch.bfloat16),
    }
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]

    write_tensors(tmp_path / "a.safetensors", entries, tensors.values())

    read = load_file(tmp_path / "a.safetensors")
    again = {
        entry.name: read_tensor(tmp_path / "a.safetensors", entry) for entry in list_tensors(tmp_path / "a.safetensors")
    }
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor) and torch.equal(again[name], tensor)
