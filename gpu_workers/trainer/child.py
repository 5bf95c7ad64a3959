"""`python -m gpu_workers.trainer.child MODULE SPEC.json WORK_DIR`: run a child's module without packages it never uses.

transformers, peft and trl import each of their integrations that is installed. Two of them take a third of the CPU time
of a child's start: bitsandbytes imports torch's compiler but serves only QLoRA, and wandb serves only the tracking
process. Garbage collections take another fifth, although imports leave almost no garbage.
"""

import gc
import importlib
import runpy
import sys
from pathlib import Path

import msgspec

from apps.contracts.hyperparameters import Method
from gpu_workers.common.config import read_launch_environment


class _Recipe(msgspec.Struct, frozen=True):
    method: str = Method.LORA


class _Spec(msgspec.Struct, frozen=True):
    """The fields of a run's or a measurement's specification that decide what its child imports."""

    method: str | None = None
    hyperparameters: _Recipe = _Recipe()
    gpu_count: int = 1
    parallelism: str | None = None


def read_spec(path: Path) -> _Spec:
    return msgspec.json.decode(path.read_bytes(), type=_Spec)


def needs_libraries(spec: _Spec) -> bool:
    """Return whether this process itself trains. With several processes, the first only starts the others."""
    is_alone = spec.gpu_count == 1 and spec.parallelism != "fsdp"
    return is_alone or read_launch_environment() is not None


def leave_out_unused(spec: _Spec) -> None:
    """Make the packages that this specification does not need look uninstalled."""
    is_quantized = (spec.method or spec.hyperparameters.method) == Method.QLORA
    for name in ("wandb",) if is_quantized else ("wandb", "bitsandbytes"):
        sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark: an import of it fails


def import_libraries() -> None:
    """Import torch, transformers and peft without garbage collections, and exclude their objects from later ones."""
    gc.disable()
    try:
        importlib.import_module("peft")  # it imports the others
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    module = sys.argv.pop(1)
    spec = read_spec(Path(sys.argv[1]))
    leave_out_unused(spec)
    if needs_libraries(spec):
        import_libraries()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
