"""What a training child imports, and how."""

import gc
import importlib.util
import sys

import pytest

from gpu_workers.trainer.child import import_libraries, leave_out_unused, needs_libraries, read_spec


@pytest.mark.parametrize(
    ("spec", "left_out"),
    [
        ('{"run_id": "1", "hyperparameters": {"method": "lora"}}', ["wandb", "bitsandbytes"]),
        ('{"run_id": "1", "hyperparameters": {"lora_rank": 8}}', ["wandb", "bitsandbytes"]),
        ('{"run_id": "1", "hyperparameters": {"method": "qlora"}}', ["wandb"]),
        ('{"base_model": {}, "method": "full"}', ["wandb", "bitsandbytes"]),
        ('{"base_model": {}, "method": "qlora"}', ["wandb"]),
    ],
)
def test_only_qlora_imports_bitsandbytes(tmp_path, monkeypatch, spec, left_out):
    for name in ("wandb", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, name, "installed")
    (tmp_path / "spec.json").write_text(spec)

    leave_out_unused(read_spec(tmp_path / "spec.json"))

    assert [name for name in ("wandb", "bitsandbytes") if sys.modules[name] is None] == left_out
    assert all(importlib.util.find_spec(name) is None for name in left_out)  # so libraries see no such package


@pytest.mark.parametrize(
    ("spec", "rank", "is_needed"),
    [
        ('{"run_id": "1"}', None, True),
        ('{"run_id": "1", "gpu_count": 1, "parallelism": "single"}', None, True),
        ('{"run_id": "1", "gpu_count": 2, "parallelism": "ddp"}', None, False),
        ('{"run_id": "1", "gpu_count": 1, "parallelism": "fsdp"}', None, False),
        ('{"run_id": "1", "gpu_count": 2, "parallelism": "ddp"}', "1", True),
    ],
)
def test_a_child_that_only_starts_others_imports_no_library(tmp_path, monkeypatch, spec, rank, is_needed):
    (tmp_path / "spec.json").write_text(spec)
    for name, value in (("RANK", rank), ("WORLD_SIZE", rank and "2")):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)

    assert needs_libraries(read_spec(tmp_path / "spec.json")) is is_needed


def test_libraries_are_imported_without_collections_that_work_again_afterwards(tmp_path, monkeypatch):
    (tmp_path / "peft.py").write_text("import gc\nwas_collecting = gc.isenabled()\nleft = [[]]\n")
    monkeypatch.syspath_prepend(tmp_path)
    frozen = gc.get_freeze_count()
    try:
        import_libraries()

        assert sys.modules["peft"].was_collecting is False
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
        del sys.modules["peft"]
