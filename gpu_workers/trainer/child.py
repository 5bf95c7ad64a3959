"""`python -m gpu_workers.trainer.child MODULE SPEC.json WORK_DIR`: run a child's module without packages it never uses.

transformers, peft and trl import each of their integrations that is installed. Two of them take a third of the CPU time
of a child's start: bitsandbytes imports torch's compiler but serves only QLoRA, and wandb serves only the tracking
process.
"""

import runpy
import sys
from pathlib import Path

import msgspec

from apps.contracts.runs import Method


class _Recipe(msgspec.Struct, frozen=True):
    method: str = Method.LORA


class _Spec(msgspec.Struct, frozen=True):
    """The method in a run's or a measurement's specification."""

    method: str | None = None
    hyperparameters: _Recipe = _Recipe()


def leave_out_unused(spec_path: Path) -> None:
    """Make the packages that this specification does not need look uninstalled."""
    spec = msgspec.json.decode(spec_path.read_bytes(), type=_Spec)
    is_quantized = (spec.method or spec.hyperparameters.method) == Method.QLORA
    for name in ("wandb",) if is_quantized else ("wandb", "bitsandbytes"):
        sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark: an import of it fails


if __name__ == "__main__":
    module = sys.argv.pop(1)
    leave_out_unused(Path(sys.argv[1]))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
