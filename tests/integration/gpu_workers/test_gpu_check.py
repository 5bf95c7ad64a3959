"""The check of a new CUDA machine: each check in its own process, and one report. The GPUs here are a twin of NVML."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from apps.contracts.hyperparameters import Method
from apps.estimates.calibration import predict_point
from apps.estimates.physics.gpus import load
from apps.estimates.requests import PoolFacts
from gpu_workers.bench.gpu_check import __main__ as gpu_check
from gpu_workers.bench.gpu_check import machine, training
from gpu_workers.bench.gpu_check.findings import Checked, Finding, Verdict
from gpu_workers.bench.gpu_check.runner import Check
from gpu_workers.common import preflight
from tests.twins.nvml import make_nvml

HERE = "tests.integration.gpu_workers.test_gpu_check"


def passes(folder: Path) -> Finding:
    return Finding(verdict=Verdict.PASSED, said="It works.")


def is_slow(folder: Path) -> Finding:
    (folder / "points.jsonl").write_text('{"is_busy":false,"load_1m":0.1,"reason":"did_not_fit"}\n')
    return Finding(verdict=Verdict.WARNING, said="It is slow.", advice="Cool it.")


def raises(folder: Path) -> Finding:
    raise RuntimeError("no kernel image is available")


def dies(folder: Path) -> Finding:
    os.write(2, b"Segmentation fault\n")
    os._exit(139)


def hangs(folder: Path) -> Finding:
    time.sleep(600)
    raise AssertionError


def checks(*names: str) -> tuple[Check, ...]:
    return tuple(Check(name, name.capitalize(), 3.0 if name == "hangs" else 60.0, f"{HERE}:{name}") for name in names)


@pytest.fixture
def cards(monkeypatch):
    """A machine with two H100."""
    monkeypatch.setattr(preflight, "pynvml", make_nvml("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"))


@pytest.mark.slow
def test_a_check_that_raises_dies_or_hangs_stops_no_other_and_the_report_says_what_to_do(
    cards, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(gpu_check, "CHECKS", checks("raises", "dies", "hangs", "is_slow", "passes"))

    assert gpu_check.main(["--into", str(tmp_path / "kept")]) == 1

    said = capsys.readouterr().out
    assert "1 passed, 1 warning, 3 failed." in said
    assert "- Raises: RuntimeError: no kernel image is available Read " in said
    assert "- Dies: Its process ended unexpectedly (139). Its last line: Segmentation fault" in said
    assert "- Hangs: It did not end within 3 s." in said
    assert said.index("- Hangs") < said.index("- Is_slow: It is slow. Cool it.")
    kept = msgspec.json.decode((tmp_path / "kept/report.json").read_bytes(), type=list[Checked])
    assert [each.finding.verdict for each in kept] == ["failed", "failed", "failed", "warning", "passed"]
    assert "did_not_fit" in (tmp_path / "kept/points.jsonl").read_text()


def test_a_machine_without_cuda_is_told_so_in_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(preflight, "pynvml", None)

    assert gpu_check.main(["--into", str(tmp_path)]) == 2

    [sentence] = capsys.readouterr().out.splitlines()
    assert sentence.startswith("There is no usable CUDA GPU here: no NVIDIA driver answers; this machine has ")


def test_a_broken_driver_is_no_machine_without_gpus(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(preflight, "pynvml", make_nvml(error="Driver/library version mismatch"))

    assert gpu_check.main(["--into", str(tmp_path)]) == 2

    assert "installed but broken (NVML: Driver/library version mismatch)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "options", "verdict", "words"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, {}, "passed", "Driver 580.65 with 2 GPUs: NVIDIA H100 80GB HBM3 (80 GiB)"),
        (["NVIDIA L4"], {"driver": "550.54"}, "failed", "Install driver 580 or newer"),
        (["NVIDIA L4", "NVIDIA A10G"], {}, "warning", "one worker for each type"),
        (["NVIDIA L4"], {"free_share": 0.5}, "warning", "Other processes use GPU memory"),
    ],
)
def test_driver_and_cards_are_judged_by_what_nvml_answers(monkeypatch, tmp_path, names, options, verdict, words):
    monkeypatch.setattr(preflight, "pynvml", make_nvml(*names, **options))

    found = machine.check_driver(tmp_path)

    assert found.verdict == verdict and words in f"{found.said} {found.advice}"


def test_packages_are_compared_with_the_lock():
    locked = machine.locked_versions(
        "# a lock\nTorch_Audio==2.0 --hash=sha256:1\nvllm==0.32.0 --hash=sha256:2\nfoo==1\n"
    )

    assert machine.find_differences(locked, {"torch-audio": "2.0+cu130", "vllm": "0.31.0"}) == [
        "vllm 0.31.0 (locked 0.32.0)",
        "foo missing (locked 1)",
    ]


def test_all_checks_together_end_within_twenty_minutes():
    assert sum(check.seconds for check in gpu_check.CHECKS) < 20 * 60


def test_a_worker_leases_the_gpus_that_it_may_see_by_their_uuids(monkeypatch):
    monkeypatch.setattr(preflight, "pynvml", make_nvml("NVIDIA L4", "NVIDIA L4", "NVIDIA L4"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert preflight.list_devices() == ("GPU-0", "GPU-1", "GPU-2")
    assert [each.total_bytes for each in preflight.list_gpu_memory(["GPU-2"])] == [80 * 2**30 + 2]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-0")
    assert preflight.list_devices() == ("GPU-2", "GPU-0")
    assert len(preflight.list_gpus()) == 2


@pytest.mark.parametrize(("cards", "visible"), [(1, ""), (1, "-1"), (1, "-1,0"), (0, None)])
def test_a_worker_with_a_driver_and_no_gpu_trains_on_its_processor(cards, visible, monkeypatch):
    monkeypatch.setattr(preflight, "pynvml", make_nvml(*["NVIDIA L4"] * cards))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    [device] = preflight.list_devices()

    assert preflight.list_gpu_memory([device]) == ()  # so that the memory of the machine counts


def test_a_worker_finds_a_gpu_by_the_beginning_of_its_uuid(monkeypatch):
    monkeypatch.setattr(preflight, "pynvml", make_nvml("NVIDIA L4"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU")

    assert preflight.list_devices() == ("GPU-0",)


@pytest.mark.parametrize(
    ("memory", "speed", "verdict", "words"),
    [
        (1.0, 1.0, "passed", "quoted"),
        (1.3, 1.0, "failed", "jobs that fill the GPU will fail"),
        (1.0, 0.3, "warning", "outside the quote's range"),
    ],
)
def test_memory_and_speed_are_compared_with_the_quote(memory, speed, verdict, words):
    gpu = load(training.GPU_TYPES)["h100-sxm-80"]
    point = training.choose_point(Method.QLORA, gpu)
    empty = training.as_report(point)
    estimate, rate = predict_point(empty, pool=PoolFacts(gpu=gpu))
    report = msgspec.structs.replace(
        empty, peak_memory_bytes=round(memory * estimate.peak_bytes), tokens_per_second=speed * rate
    )

    found = training.judge(report, estimate, rate)

    assert (point.shape, found.verdict) == ("llama-3.1-8b", verdict)
    assert words in f"{found.said} {found.advice}"


def test_a_small_card_measures_a_shape_that_fits():
    card = load(training.GPU_TYPES)["t4-16"]

    assert training.choose_point(Method.LORA, card).shape == "llama-3.2-1b"
