"""A run that could only fail on this machine is refused before anything of it is downloaded."""

import msgspec
import pytest

from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import BaseModelRef, CheckpointRef, DatasetRef, RunSpec, SignedFile
from gpu_workers.common.preflight import GpuMemory
from gpu_workers.trainer import run_checks
from gpu_workers.trainer.run_checks import Refused, check_run, needed_disk_bytes

GIB = 1024**3


def make_spec(**changes) -> RunSpec:
    spec = RunSpec(
        run_id="run_1",
        job_id="ftjob-1",
        organization_id="org_1",
        attempt=1,
        base_model=BaseModelRef(id="bm_1", name="tiny", path="tiny"),
        training=DatasetRef(id="ds", sha256="", bytes=1000, rows=1, url=""),
        hyperparameters=Hyperparameters(),
    )
    return msgspec.structs.replace(spec, **changes)


@pytest.fixture
def card(monkeypatch):
    """A GPU of 24 GiB, 20 of them free."""
    monkeypatch.setattr(
        run_checks, "list_gpu_memory", lambda _: (GpuMemory(total_bytes=24 * GIB, free_bytes=20 * GIB),)
    )


def test_what_fits_passes_without_a_word(card, tmp_path):
    assert check_run(make_spec(estimated_peak_bytes=18 * GIB), tmp_path, ["0"]) == ()


def test_memory_that_others_hold_is_told_and_left_to_the_rehearsal(card, tmp_path):
    [warning] = check_run(make_spec(estimated_peak_bytes=22 * GIB), tmp_path, ["0"])

    assert "20.0 are free" in warning.message and "22.0" in warning.message


def test_an_estimate_above_the_whole_card_is_refused(card, tmp_path):
    with pytest.raises(Refused, match=r"needs 30\.0 GiB by its estimate, the machine has 24\.0") as refused:
        check_run(make_spec(estimated_peak_bytes=30 * GIB), tmp_path, ["0"])

    assert refused.value.code is FailureCode.OUT_OF_MEMORY


def test_a_rehearsal_above_the_whole_card_is_refused_if_nothing_smaller_is_left(card, tmp_path):
    least = Hyperparameters(batch_size=4, gradient_accumulation_steps=4, gradient_checkpointing=True)
    spec = make_spec(estimated_peak_bytes=18 * GIB, rehearsed_bytes=25 * GIB, hyperparameters=least)

    with pytest.raises(Refused, match=r"needs 25\.0 GiB by its rehearsal, the machine has 24\.0"):
        check_run(spec, tmp_path, ["0"])

    shrinkable = msgspec.structs.replace(spec, hyperparameters=Hyperparameters(batch_size=4))
    assert [line.level for line in check_run(shrinkable, tmp_path, ["0"])] == ["info", "warn"]
    [line] = check_run(msgspec.structs.replace(spec, rehearsed_bytes=19 * GIB), tmp_path, ["0"])
    assert line.message == "Rehearsed: 19.0 of 24.0 GiB."


def test_a_machine_without_a_gpu_is_asked_for_its_own_memory(tmp_path):
    with pytest.raises(Refused, match="by its estimate"):
        check_run(make_spec(estimated_peak_bytes=10**15), tmp_path, ["0"])


def test_rows_and_three_copies_of_a_checkpoint_need_room(card, tmp_path):
    file = SignedFile(name="optimizer.pt", url="", sha256="", bytes=10**17)
    checkpoint = CheckpointRef(id="ckpt_1", step=5, manifest_sha256="", files=(file,))
    spec = make_spec(resume_from=checkpoint)

    with pytest.raises(Refused, match="free disk") as refused:
        check_run(spec, tmp_path, ["0"])

    assert refused.value.code is FailureCode.DISK_FULL
    assert needed_disk_bytes(spec) == 1000 + 3 * 10**17


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"target_modules": ("q_proj", "embed_tokens")}, "layers embed_tokens"),
        ({"lora_rank": 1024}, "rank 1024"),
        ({"lora_rank": 8, "lora_alpha": 1024}, "a scale of 128"),
    ],
)
def test_an_adapter_that_no_replica_takes_is_not_trained(card, tmp_path, changes, word):
    with pytest.raises(Refused, match=word) as refused:
        check_run(make_spec(hyperparameters=Hyperparameters(**changes)), tmp_path, ["0"])

    assert refused.value.code is FailureCode.ADAPTER_REJECTED


def test_dora_is_delivered_as_a_model_and_may_have_any_shape(card, tmp_path):
    assert check_run(make_spec(hyperparameters=Hyperparameters(use_dora=True, lora_rank=1024)), tmp_path, ["0"]) == ()
