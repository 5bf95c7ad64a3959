"""When a worker begins to measure its speed."""

import pytest

from apps.contracts.runs import BaseModelRef
from apps.contracts.worker_api import MissingProbes, ProbeReport, ProbeRequest
from gpu_workers.common.api_client import ApiError, Unavailable
from gpu_workers.trainer.children import cpu_threads
from gpu_workers.trainer.idle import probes
from gpu_workers.trainer.idle.probes import Prober

HZ = 100  # ticks of a core in a second


class Machine:
    """Two cores with a clock; `busy_until` are the seconds at which programs that keep a core each end."""

    def __init__(self, tmp_path, *busy_until: float) -> None:
        self.now, self._busy_until, self._stat = 0.0, busy_until, tmp_path / "stat"
        self._busy, self._idle = 0.0, 0.0
        self.sleep(0.0)

    @property
    def stat(self):
        return self._stat

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        busy = sum(self.now < end for end in self._busy_until) + 0.25  # the idle platform
        self._busy += min(busy, 2.0) * seconds
        self._idle += max(2.0 - busy, 0.0) * seconds
        self.now += seconds
        self._stat.write_text(f"cpu {self._busy * HZ:.0f} 0 0 {self._idle * HZ:.0f} 0 0 0 0 0 0\n")


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """Return the second at which a measurement begins, None if a run came before."""

    def begin(*busy_until: float, method="qlora", not_before=0.0, run_at=1e9) -> float | None:
        machine = Machine(tmp_path, *busy_until)
        monkeypatch.setattr(cpu_threads, "_STAT", machine.stat)
        monkeypatch.setattr(probes, "time", machine)
        request = ProbeRequest(
            base_model=BaseModelRef(id="tiny", name="tiny"), method=method, micro_batch_size=1, sequence_length=8,
            is_first=True,
        )  # fmt: skip
        prober = Prober(None, None, gpu_key="cpu", device="0", executor=None)
        is_free = prober._wait_for_quiet(request, should_stop=lambda: machine.now >= run_at, not_before=not_before)
        return machine.now if is_free else None

    return begin


@pytest.mark.parametrize(
    ("busy_until", "not_before", "seconds"),
    [
        ((), 0.0, 2.0),
        ((), 30.0, 30.0),  # after a run
        ((70.0, 70.0), 30.0, 72.0),  # requests to its adapter keep both cores busy for a while
        ((1e9,), 30.0, 120.0),  # a core that is always busy is this machine's usual load
    ],
)
def test_a_measurement_waits_until_the_machine_is_quiet(begin, busy_until, not_before, seconds):
    assert begin(*busy_until, not_before=not_before) == pytest.approx(seconds, abs=2.5)


@pytest.mark.parametrize(("busy_until", "seconds"), [((30.0, 30.0), 32.0), ((1e9, 1e9), 45.0)])
def test_the_measurement_without_which_a_pool_cannot_quote_waits_less(begin, busy_until, seconds):
    """Other programs of the platform start on the same machine."""
    assert begin(*busy_until, method="lora") == pytest.approx(seconds, abs=2.5)


def test_a_run_does_not_wait_for_a_measurement_that_waits(begin):
    assert begin(1e9, not_before=30.0, run_at=10.0) is None


class Plane:
    """The control plane: it misses one measurement and takes no report."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    def list_missing_probes(self, base_model_id: str = "") -> MissingProbes:
        model = BaseModelRef(id="tiny", name="tiny", path="/models/tiny")
        return MissingProbes(
            probes=(ProbeRequest(base_model=model, method="lora", micro_batch_size=1, sequence_length=8),)
        )

    def report_probe(self, report: ProbeReport) -> None:
        self.asked += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "times"), [(ApiError(400, "invalid_value", "gpu_key"), 3), (Unavailable("no answer"), 5)]
)
def test_a_measurement_is_abandoned_after_three_refused_reports_but_not_without_an_answer(monkeypatch, error, times):
    plane = Plane(error)
    prober = Prober(None, plane, gpu_key="cpu", device="0", executor=None)
    monkeypatch.setattr(prober, "_wait_for_quiet", lambda *_, **__: True)
    monkeypatch.setattr(prober, "_measure", lambda request, should_stop: "measured")

    for _ in range(5):
        request = prober.find()
        assert request is None or not prober.run(request, should_stop=lambda: False)

    assert plane.asked == times
    assert (prober.find() is None) == (times == 3)
