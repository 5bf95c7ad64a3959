"""The memory rehearsal: fake tensors give what real ones take, and two shallow depths give the whole model."""

import msgspec
import pytest

from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.contracts.runs import MemoryRequest
from apps.estimates.models.architectures import from_catalog_row
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.memory import peak_memory
from gpu_workers.common.config import child_environment
from gpu_workers.common.preflight import GpuMemory
from gpu_workers.rehearsal.rehearse import rehearse_memory
from gpu_workers.rehearsal.trace import run_spec
from gpu_workers.trainer import run_checks
from gpu_workers.trainer.idle import rehearsals
from tests.bench.rehearsal.grid import catalog_cases, plan_of
from tests.bench.rehearsal.real import real_peak_bytes

GPU = Gpu(key="gpu", name="gpu", memory_bytes=0)

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 352,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048, "tie_word_embeddings": True,
    "pad_token_id": 0,
}  # fmt: skip


def request(**recipe: object) -> MemoryRequest:
    made = Hyperparameters(lora_dropout=0.0, **recipe)  # type: ignore[arg-type]
    return MemoryRequest(config=CONFIG, hyperparameters=made, rows=2, row_tokens=64, trained_share=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_fake_tensors_take_what_real_ones_take(method: Method) -> None:
    asked = msgspec.structs.replace(request(method=method), is_on_cpu=True, is_full_depth=True)

    assert rehearse_memory(asked).allocated_bytes == pytest.approx(real_peak_bytes(asked), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "lora, 8 rows", "lora without checkpoints, 16 rows", "qlora, 8 rows", "dora without checkpoints, 4 rows",
        "full, 8 rows", "full, 8 rows twice a step", "full without checkpoints, 8 rows",
    ],
)  # fmt: skip
def test_the_formula_counts_what_the_trainer_keeps_of_each_row(recipe: str) -> None:
    [case] = [case for case in catalog_cases() if case.name == f"Qwen3-0.6B: {recipe}"]
    architecture = from_catalog_row(case.row)

    said = peak_memory(architecture=architecture, plan=plan_of(case.request, architecture), gpu=GPU)

    assert said.allocated_bytes == pytest.approx(rehearse_memory(case.request).allocated_bytes, rel=0.03)


@pytest.mark.slow
def test_the_command_extrapolates_two_depths_and_shares_a_model_among_gpus(fork_server, tmp_path) -> None:
    lora = request(gradient_checkpointing=True)
    full = request(method=Method.FULL)
    asked = [
        lora,
        msgspec.structs.replace(lora, is_full_depth=True),
        full,
        msgspec.structs.replace(full, gpu_count=4, parallelism="fsdp"),
        msgspec.structs.replace(lora, config={"model_type": "unheard-of"}),
    ]
    with (tmp_path / "log").open("w+b") as log:  # a fork, which need not import torch; below it is an interpreter
        command = fork_server.fork(
            "gpu_workers.rehearsal", [], log=log.fileno(), environment=child_environment(threads=1, devices=())
        )
        with command.stdin as stdin:
            stdin.writelines(msgspec.json.encode(each) + b"\n" for each in asked)
        assert command.wait(300) == 0
        log.seek(0)
        answers = [msgspec.json.decode(line) for line in log if line.startswith(b"{")]

    shallow, whole, alone, shared, unknown = answers

    assert shallow["allocated_bytes"] == pytest.approx(whole["allocated_bytes"], rel=0.001)
    assert shared["resting_bytes"] == pytest.approx(alone["resting_bytes"] / 4, rel=0.02)
    assert "unheard-of" in unknown["error"]


@pytest.mark.slow
def test_only_stacks_that_prepare_a_4_bit_model_hold_its_other_weights_in_float32() -> None:
    asked = msgspec.structs.replace(request(method=Method.QLORA), stack="hf")

    prepared, plain = (rehearse_memory(msgspec.structs.replace(asked, stack=stack)) for stack in ("hf", "axolotl"))

    embedding = 2048 * 128  # tied to the head
    assert prepared.resting_bytes - plain.resting_bytes == pytest.approx(2 * embedding, rel=0.05)
    assert prepared.weight_bytes == plain.weight_bytes


@pytest.mark.slow
def test_a_run_that_the_rehearsal_shows_too_large_is_refused_before_it_loads(monkeypatch, tmp_path) -> None:
    asked = msgspec.structs.replace(request(gradient_checkpointing=True, batch_size=2), rows=1)
    spec = msgspec.structs.replace(run_spec(asked), rehearsal=asked, estimated_peak_bytes=1)
    assert rehearsals.with_rehearsal(spec, should_stop=lambda: False) == spec, "a CPU's runs start at once"
    monkeypatch.setattr(rehearsals, "list_gpus", lambda: ("a GPU",))
    monkeypatch.setattr(rehearsals, "_LEASED_SECONDS", 300.0)  # other tests keep the cores busy
    card = GpuMemory(total_bytes=2**29, free_bytes=2**29)  # CUDA's context alone takes more
    monkeypatch.setattr(run_checks, "list_gpu_memory", lambda _: (card,))

    rehearsed = rehearsals.with_rehearsal(spec, should_stop=lambda: False)
    stopped = rehearsals.with_rehearsal(spec, should_stop=lambda: True)
    monkeypatch.setattr(rehearsals, "_LEASED_SECONDS", 0.0)
    too_slow = rehearsals.with_rehearsal(spec, should_stop=lambda: False)

    assert stopped.rehearsed_bytes is too_slow.rehearsed_bytes is None
    with pytest.raises(run_checks.Refused, match=r"needs 1\.\d GiB by its rehearsal, the machine has 0\.5"):
        run_checks.check_run(rehearsed, tmp_path, ["0"])
