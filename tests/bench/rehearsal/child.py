"""The bench itself, in the engines' environment: writes a line a job and, last, the figures as JSON."""

import gpu_workers.rehearsal.lean  # isort: skip  # noqa: F401
import argparse
import gc
import resource
import sys
import time
from statistics import median

import msgspec

from apps.contracts.runs import MemoryReport, MemoryRequest
from apps.estimates.models.architectures import from_catalog_row
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.memory import peak_memory
from gpu_workers.rehearsal.rehearse import rehearse_memory
from tests.bench.rehearsal.grid import Case, catalog_cases, plan_of, shared_cases, small_cases
from tests.bench.rehearsal.real import real_peak_bytes, shared_peaks

_DEPTH = 8  # layers of a model whose every layer is traced
_GPU = Gpu(key="gpu", name="gpu", memory_bytes=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formula", type=int, default=330, help="recipes on catalogue models")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--real", type=int, default=48)
    parser.add_argument("--shared", type=int, default=8, help="jobs of two processes")
    given = parser.parse_args()
    gc.freeze()  # as `python -m gpu_workers.rehearsal` does
    cases = catalog_cases()
    seconds: list[float] = []
    formula = [_formula_error(case, seconds) for case in cases[: given.formula]]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    depth = [_depth_error(case) for case in cases[: given.depth]]
    small = list(small_cases())
    step = max(1, len(small) // given.real) if given.real else 1
    real = [_real_error(case) for case in small[::step][: given.real]]
    shared = _shared_errors(list(shared_cases())[: given.shared])
    figures = {
        "real": len(real), **_summary("real", real), "shared": len(shared), **_summary("shared", shared),
        "depth_worst_ape": round(max(depth, default=0.0), 5),
        "formula": len(formula), **_summary("formula", formula),
        "seconds_warm": round(median(seconds[1:] or seconds or [0.0]), 2), "rss_gib": round(rss, 3),
    }  # fmt: skip
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")


def _summary(name: str, errors: list[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    return {
        f"{name}_median_ape": round(median(sizes), 4) if sizes else 0.0,
        f"{name}_worst_ape": round(sizes[-1], 4) if sizes else 0.0,
    }


def _formula_error(case: Case, seconds: list[float]) -> float:
    started = time.process_time()
    found = _rehearse(case.request)
    seconds.append(time.process_time() - started)
    assert case.row is not None
    architecture = from_catalog_row(case.row)
    said = peak_memory(architecture=architecture, plan=plan_of(case.request, architecture), gpu=_GPU)
    error = said.allocated_bytes / found.allocated_bytes - 1
    _write("formula", case.name, error, f"{found.allocated_bytes / 2**30:.2f} GiB at {found.moment}, not {said.phase}")
    return error


def _depth_error(case: Case) -> float:
    config = dict(case.request.config) | {"num_hidden_layers": _DEPTH}
    request = msgspec.structs.replace(case.request, config=config)
    shallow = _rehearse(request).allocated_bytes
    whole = _rehearse(msgspec.structs.replace(request, is_full_depth=True)).allocated_bytes
    _write("depth", case.name, shallow / whole - 1)
    return abs(shallow / whole - 1)


def _real_error(case: Case) -> float:
    request = msgspec.structs.replace(case.request, is_full_depth=True)
    return _error_of("real", case, request, real_peak_bytes(request))


def _shared_errors(cases: list[Case]) -> list[float]:
    requests = [msgspec.structs.replace(case.request, is_full_depth=True) for case in cases]
    peaks = shared_peaks(requests)
    return [_error_of("shared", *each) for each in zip(cases, requests, peaks, strict=True)]


def _error_of(kind: str, case: Case, request: MemoryRequest, real: int) -> float:
    error = _rehearse(request).allocated_bytes / real - 1
    _write(kind, case.name, error, f"{real / 2**20:.1f} MiB")
    return error


def _rehearse(request: MemoryRequest) -> MemoryReport:
    found = rehearse_memory(request)
    gc.collect()
    return found


def _write(kind: str, name: str, error: float, more: str = "") -> None:
    sys.stdout.write(f"{kind:8} {100 * error:+7.2f} %  {name}  {more}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
