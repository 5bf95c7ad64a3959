"""The grid of made-up shapes: models as the trainer would load them, one child a point, reported as probes are."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from transformers import AutoConfig, AutoModelForCausalLM

from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.contracts.runs import BaseModelRef
from apps.contracts.worker_api import ProbeReport, ProbeRequest
from apps.estimates.models.architectures import from_config, parameter_count
from apps.estimates.physics import gpus
from apps.estimates.quote import PoolFacts, QuoteRequest, quote
from gpu_workers.bench import calibrate, made_up, probe
from gpu_workers.bench.calibrate import CPU_GRID, CUDA_GRID, SHAPES, GridPoint
from gpu_workers.bench.probe import GPU_WINDOW, Window
from gpu_workers.common.api_client import ApiClient
from gpu_workers.common.events import LOG_FILE, SPEC_FILE
from gpu_workers.common.preflight import GpuMemory, inspect_machine
from gpu_workers.train.model.hardware import choose_engine, detect
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.idle.probes import PROBE_FILE
from tests.twins.control_plane import CREDENTIAL, ControlPlane

DATA = Path(__file__).parents[3] / "apps/catalog/data"
POINT = GridPoint("small-3m", "qlora", 8, 32, 2, checkpointing=True)


@pytest.fixture
def folder(tmp_path):
    return made_up.write_folder(tmp_path / "shape", SHAPES["small-3m"])


def build(folder, method):
    engine = choose_engine(detect(), Hyperparameters(method=method))
    return made_up.build_base(folder, method=method, engine=engine)


def report_of(point: GridPoint) -> ProbeReport:
    return ProbeReport(
        base_model_id="", method=point.method, gpu_key="cpu", micro_batch_size=1, sequence_length=8, lora_rank=8,
        threads=1, tokens_per_second=1.0, tokens_per_second_low=1.0, tokens_per_second_high=1.0,
        seconds_per_micro_step=8.0, peak_memory_bytes=1, startup_seconds=1.0, shape=point.shape, config={},
    )  # fmt: skip


def test_made_up_weights_stand_where_the_real_ones_would(folder):
    quantized, plain = (build(folder, method) for method in (Method.QLORA, Method.LORA))

    assert {name for name, _ in quantized.named_modules()} == {name for name, _ in plain.named_modules()}
    assert torch.equal(quantized.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    assert not any(tensor.is_meta for tensor in (*quantized.parameters(), *quantized.buffers()))
    linear = [type(module) for name, module in quantized.named_modules() if name.endswith("_proj")]
    assert set(linear) == {Linear4bit}
    assert quantized.lm_head.weight is quantized.model.embed_tokens.weight


def test_a_made_up_model_computes_in_the_four_bits_the_trainer_loads(folder):
    quantized = build(folder, Method.QLORA)

    layer = quantized.model.layers[0].mlp.up_proj
    state = layer.weight.quant_state
    assert (state.quant_type, state.nested, layer.compute_dtype) == ("nf4", True, quantized.dtype)
    assert tuple(state.shape) == (SHAPES["small-3m"]["intermediate_size"], SHAPES["small-3m"]["hidden_size"])
    with torch.no_grad():
        assert torch.isfinite(quantized(input_ids=torch.arange(8)[None]).logits).all()


class ProbeHere:
    """Runs the probe in this process; that it starts as a separate interpreter is asserted of the prober."""

    def __init__(self, module: str, **_: object) -> None:
        assert module == probe.__name__

    def start(self, work_dir: Path, *, devices: Sequence[str]) -> "ProbeHere":
        request = msgspec.json.decode((work_dir / SPEC_FILE).read_bytes(), type=ProbeRequest)
        report = probe.measure(request, work_dir, hub_token=None)
        (work_dir / PROBE_FILE).write_bytes(msgspec.json.encode(report))
        return self

    def wait(self, timeout_seconds: float) -> int:
        return 0


@pytest.mark.slow
def test_a_point_is_measured_and_reported(plane: ControlPlane, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "SubprocessExecutor", ProbeHere)
    monkeypatch.setattr(probe, "CPU_WINDOW", Window(measured=0.3, longest=0.6))
    monkeypatch.setattr(calibrate, "CPU_GRID", (POINT,))
    monkeypatch.setattr("gpu_workers.bench.calibrate.os.getloadavg", lambda: (0.5, 0.5, 0.5))
    (tmp_path / "credential.json").write_text(
        json.dumps({"worker_id": "worker_1", "credential": CREDENTIAL, "pool": "cpu"})
    )
    monkeypatch.setenv("ANNEAL_INTERNAL_URL", plane.url)
    monkeypatch.setenv("ANNEAL_WORK_DIR", str(tmp_path))

    code = calibrate.main(["--into", str(tmp_path / "points.jsonl"), "--post", "--threads", "1", "--gpu-key", "cpu"])

    assert code == 0
    (line,) = (tmp_path / "points.jsonl").read_text().splitlines()
    row = json.loads(line)
    report = msgspec.convert(row["report"], ProbeReport)
    assert plane.reports == [report]
    assert (report.shape, report.method, report.lora_rank, report.gpu_key) == ("small-3m", "qlora", 8, "cpu")
    assert (report.micro_batch_size, report.sequence_length, report.gradient_checkpointing) == (2, 32, True)
    assert report.tokens_per_second_low <= report.tokens_per_second <= report.tokens_per_second_high
    assert report.peak_memory_bytes > 10**8
    assert (report.peak_allocated_bytes, report.threads) == (None, 1)
    assert report.config["hidden_size"] == 192
    assert row["cores"] >= 1


def measure_under(*loads: tuple[float, float, float], folder: Path) -> ProbeReport:
    """Return the report of a loop under these loads: seconds, tokens a second of computing, share of waiting."""
    watch, at, waited, tokens = probe.Stopwatch(GPU_WINDOW), 0.0, 0.0, 0.0
    for seconds, speed, share in loads:
        end = at + seconds
        while at < end:
            step = 400 / speed / (1 - share)
            at, waited, tokens = at + step, waited + share * step, tokens + 400
            if watch.add(probe.StepEnd(at, waited, tokens)):
                request = ProbeRequest(
                    base_model=BaseModelRef(id="", name=""), method="qlora", micro_batch_size=16, sequence_length=25
                )
                return probe._report(request, watch.steps(), 1.0, folder)
    raise AssertionError("the measurement did not end")


@pytest.mark.parametrize(
    ("loads", "speed", "waited"),
    [
        ([(60.0, 2_000.0, 0.01)], 2_000.0, 0.01),
        ([(10.0, 1_600.0, 0.5), (60.0, 2_000.0, 0.01)], 2_000.0, 0.01),  # requests to a new adapter, which end
        ([(60.0, 2_000.0, 0.11)], 2_000.0, 0.11),  # another program keeps a core
        ([(3.0, 2_000.0, 0.06), (60.0, 2_000.0, 0.16)], 2_000.0, 0.145),
    ],
)
def test_a_load_that_ends_does_not_count_and_one_that_stays_does(tmp_path, loads, speed, waited):
    report = measure_under(*loads, folder=tmp_path)

    assert report.tokens_per_second == pytest.approx(speed, rel=0.02)
    assert report.waited_share == pytest.approx(waited, abs=0.015)


def test_the_grid_stops_before_its_budget_and_says_what_was_left_out(tmp_path):
    machine = inspect_machine(tmp_path)
    executor = SubprocessExecutor(thread_limit=1, command=("true",))

    points = list(calibrate.measure_grid(machine, executor, tmp_path, budget_seconds=-1.0))

    assert [(report, reason) for _, report, reason in points] == [(None, "no_time_left")] * len(CPU_GRID)


def test_a_child_that_ran_out_of_memory_is_a_point_too(tmp_path):
    executor = SubprocessExecutor(
        thread_limit=1, command=("sh", "-c", "echo torch.OutOfMemoryError: CUDA out of memory")
    )

    assert calibrate.measure_point(POINT, executor, tmp_path, timeout_seconds=20) == (None, "did_not_fit")


def test_a_cuda_card_is_measured_on_the_real_shapes_in_order_of_worth():
    assert {(point.shape, point.method) for point in CUDA_GRID} >= {
        ("llama-3.2-1b", "lora"), ("llama-3.1-8b", "lora"), ("llama-3.1-8b", "qlora"), ("llama-3.1-70b", "qlora"),
    }  # fmt: skip
    assert {point.shape for point in (*CUDA_GRID, *CPU_GRID)} == set(SHAPES)


def test_a_point_asks_no_hub(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        calibrate, "measure_grid", lambda machine, executor, *_, **__: seen.append(executor) or iter(())
    )

    calibrate.main(["--into", str(tmp_path / "new" / "points.jsonl")])
    executor = seen[0]
    executor._command = ("sh", "-c", "echo offline=$HF_HUB_OFFLINE.")
    calibrate.measure_point(POINT, executor, tmp_path, timeout_seconds=20)

    assert "offline=1." in (tmp_path / "point" / LOG_FILE).read_text()
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    ("arguments", "key"), [(["--gpu-key", "h200-141"], "h200-141"), ([], "l4-24"), (["--gpu-key", ""], "l4-24")]
)
def test_a_machine_has_the_key_of_the_arguments_or_else_that_of_its_worker(monkeypatch, arguments, key):
    """The control plane refuses a measurement with another key than that of the worker's pool."""
    seen = []
    monkeypatch.setenv("ANNEAL_GPU_KEY", "l4-24")
    monkeypatch.setattr(calibrate, "measure_grid", lambda machine, *_, **__: seen.append(machine.gpu_key) or iter(()))

    calibrate.main(arguments)

    assert seen == [key]


def test_a_card_whose_driver_does_not_answer_is_not_taken_for_a_cpu(tmp_path, monkeypatch, capsys):
    (tmp_path / "version").write_text("NVRM")
    monkeypatch.setattr(calibrate, "_DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr("gpu_workers.common.preflight.pynvml", None)

    with pytest.raises(SystemExit):
        calibrate.main([])

    assert "nvidia-ml-py" in capsys.readouterr().err


def test_what_cannot_be_reported_is_known_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.delenv("ANNEAL_INTERNAL_URL", raising=False)
    monkeypatch.setattr(calibrate, "measure_grid", lambda *_, **__: pytest.fail("measured"))

    with pytest.raises(SystemExit):
        calibrate.main(["--post"])

    assert "ANNEAL_INTERNAL_URL" in capsys.readouterr().err


def test_a_refused_point_does_not_end_the_measuring(plane: ControlPlane, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("gpu_workers.bench.calibrate.os.getloadavg", lambda: (0.5, 0.5, 0.5))
    into = tmp_path / "points.jsonl"

    with contextlib.closing(ApiClient(plane.url, credential="of nobody")) as api:
        kept = calibrate.keep_point((POINT, report_of(POINT), ""), inspect_machine(tmp_path), into, api)

    assert kept and into.exists()
    assert "Not reported" in caplog.text


def test_a_point_sees_one_gpu_of_a_machine_with_several(tmp_path):
    executor = SubprocessExecutor(thread_limit=1, command=("sh", "-c", "echo seen=$CUDA_VISIBLE_DEVICES."))

    calibrate.measure_point(POINT, executor, tmp_path, timeout_seconds=20)

    assert "seen=0." in (tmp_path / "point" / LOG_FILE).read_text()


def test_the_shapes_are_the_models_they_are_named_after():
    rows = {row["name"].lower(): row for row in msgspec.json.decode((DATA / "models.json").read_bytes())["models"]}

    for name in ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"):
        assert parameter_count(from_config(SHAPES[name])) == rows[name]["params_computed"]
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]))
        assert built.num_parameters() == rows[name]["params_computed"]


def test_the_real_shapes_fit_an_80_gb_card_and_ten_minutes():
    """By the estimator: a child's start is reckoned at 25 s, its steps at three to warm up and six seconds or four."""
    card, seconds = gpus.load(DATA / "gpus.json")["h100-sxm-80"], 0.0
    for point in CUDA_GRID:
        tokens = point.micro * point.length
        request = QuoteRequest(
            architecture=from_config(SHAPES[point.shape]), method=point.method, lora_rank=point.rank, lora_dropout=0.0,
            max_length=point.length, longest_row_tokens=point.length, batch_size=point.micro, epochs=1,
            micro_batch_size=point.micro, gradient_checkpointing=point.checkpointing,
            rows=point.micro * 100, tokens=tokens * 100, trained_tokens=tokens * 50,
        )  # fmt: skip
        estimate = quote(request=request, pool=PoolFacts(gpu=card))
        assert estimate.fits, point
        step = estimate.train_seconds_p90 / 100
        seconds += 25 + 3 * step + max(GPU_WINDOW.measured, 4 * step)
    assert seconds < calibrate.BUDGET_SECONDS


def test_a_gpu_that_somebody_else_holds_is_busy(monkeypatch):
    def holding(gib: int) -> None:
        held = GpuMemory(total_bytes=80 * 2**30, free_bytes=(80 - gib) * 2**30)
        monkeypatch.setattr(calibrate, "list_gpu_memory", lambda _: (held,))

    holding(1)  # the driver's own
    assert not calibrate._is_gpu_busy()
    holding(20)
    assert calibrate._is_gpu_busy()


def test_a_point_of_a_busy_machine_is_kept_and_not_reported(plane: ControlPlane, tmp_path, monkeypatch):
    monkeypatch.setattr("gpu_workers.bench.calibrate.os.getloadavg", lambda: (99.0, 0.0, 0.0))
    into = tmp_path / "points.jsonl"

    with contextlib.closing(ApiClient(plane.url, credential=CREDENTIAL)) as api:
        assert calibrate.keep_point((POINT, report_of(POINT), ""), inspect_machine(tmp_path), into, api)

    assert json.loads(into.read_text())["is_busy"]
    assert plane.reports == []
