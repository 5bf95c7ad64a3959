"""`python -m gpu_workers.rehearsal`: read memory requests, one JSON object a line, and write a report for each.

A request that cannot be traced gives `{"error": reason}`. See `apps.contracts.runs` for the fields.
"""

import gpu_workers.rehearsal.lean  # isort: skip  # noqa: F401
import contextlib
import gc
import sys
import warnings

import msgspec

from apps.contracts.runs import MemoryReport, MemoryRequest
from gpu_workers.trainer.child import import_libraries

sys.modules["wandb"] = None  # type: ignore[assignment]  # no rehearsal tracks (gpu_workers/trainer/child.py)
import_libraries()
from gpu_workers.rehearsal.rehearse import rehearse_memory  # noqa: E402


def main() -> int:
    warnings.simplefilter("ignore")
    gc.freeze()  # the imported libraries stay: collections between traces need not look at their million objects
    write = sys.stdout.buffer.write
    for line in sys.stdin.buffer:
        if line.strip():
            with contextlib.redirect_stdout(sys.stderr):
                answer = _answer(line)
            write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.flush()
    return 0


def _answer(line: bytes) -> MemoryReport | dict[str, str]:
    try:
        return rehearse_memory(msgspec.json.decode(line, type=MemoryRequest))
    except Exception as error:  # noqa: BLE001 - an odd model must not end the others' rehearsals
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        gc.collect()


if __name__ == "__main__":
    sys.exit(main())
