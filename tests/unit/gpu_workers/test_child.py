"""What a training child does not import."""

import importlib.util
import sys

import pytest

from gpu_workers.trainer.child import leave_out_unused


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

    leave_out_unused(tmp_path / "spec.json")

    assert [name for name in ("wandb", "bitsandbytes") if sys.modules[name] is None] == left_out
    assert all(importlib.util.find_spec(name) is None for name in left_out)  # so libraries see no such package
