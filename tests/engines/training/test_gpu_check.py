"""The parts of `make gpu-check` that run without a GPU: two processes that add, and vLLM with certified adapters."""

from functools import partial
from pathlib import Path

import pytest
from torch import multiprocessing

from gpu_workers.bench.gpu_check import collectives
from gpu_workers.bench.gpu_check.findings import Verdict
from gpu_workers.bench.gpu_check.runner import Check, run_check

HERE = "tests.engines.training.test_gpu_check"


def serves_small_adapters(folder: Path):
    from gpu_workers.bench.gpu_check.serving import serve
    from gpu_workers.engine.cpu_adapters import leave_out_rows_without_adapter

    leave_out_rows_without_adapter()
    return serve(folder, shape="small-3m", adapters=4)


def test_two_processes_add_their_tensors(tmp_path, monkeypatch):
    """Forked: each new interpreter would import torch. With CUDA they may not be."""
    fork = partial(multiprocessing.start_processes, start_method="fork")
    monkeypatch.setattr(collectives.multiprocessing, "spawn", fork)

    found = collectives.reduce_between(tmp_path, backend="gloo", size_bytes=4096)

    assert found.verdict is Verdict.PASSED


@pytest.mark.nightly
def test_vllm_answers_with_adapters_that_peft_certifies(tmp_path):
    checked = run_check(Check("vllm", "vLLM", 300, f"{HERE}:serves_small_adapters"), tmp_path)

    assert checked.finding.verdict is Verdict.PASSED, checked.finding.said
    assert checked.finding.figures["certified"] == 4
