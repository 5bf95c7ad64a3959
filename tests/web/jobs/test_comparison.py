"""The comparison of jobs shows their curves, their results and the settings that differ. It marks the best job."""

import re
from typing import Any

import pytest

from apps.contracts import runs as wire
from apps.core.database.clock import db_now
from apps.core.templatetags.ui import usd
from apps.finetuning.jobs.progress import get_progress
from apps.finetuning.models import FineTuningJob
from apps.interfaces.web.charts.curve_overlays import draw_overlay, smoothed
from tests.support.attempts import step
from tests.support.pages import text


@pytest.fixture
def trained(floor, claim) -> Any:
    """Return a maker of a job that ran some steps and evaluated once."""

    def train(name: str, *, losses: tuple[float, ...], evaluation: float, **request: Any):
        job = floor.job(suffix=name, **request)
        attempt = claim()
        attempt.start(total_steps=len(losses))
        for number, loss in enumerate(losses, start=1):
            attempt.report(wire.StepCompleted, **step(number, loss))
        last = len(losses)
        attempt.report(wire.EvaluationCompleted, step=last, valid_loss=evaluation, valid_mean_token_accuracy=0.5)
        attempt.succeed(floor.base_model)
        return job

    return train


def url(*jobs, metric: str = "") -> str:
    return "/jobs/compare?" + "&".join(f"job={job.pk}" for job in jobs) + (f"&metric={metric}" if metric else "")


@pytest.mark.slow
def test_two_jobs_show_their_curves_what_differs_and_their_results(trained, vera, client_for):
    first = trained("slow", losses=(3.0, 2.0, 1.5), evaluation=1.4, hyperparameters={"learning_rate": 0.0001})
    second = trained("fast", losses=(3.0, 1.0, 0.5), evaluation=0.6, hyperparameters={"learning_rate": 0.001})

    page = text(client_for(vera).get(url(first, second)))
    FineTuningJob.objects.filter(pk=first.pk).update(gpu_count=2, node_count=2)
    on_two_machines = text(client_for(vera).get(url(first, second)))

    assert "Machines" in on_two_machines.partition("Settings that differ")[2].partition("<details")[0]
    assert page.count('class="svg-curve') == 2
    different = page.partition("Settings that differ")[2].partition("<details")[0]
    assert "Learning rate" in different and "0.0001" in different and "0.001" in different
    assert "Epochs" not in different and "Machines" not in different
    assert "0.6000" in page and "1.4000" in page
    values = re.findall(r'<td class="(?:num|break)" data-label="(\w+)">', page)
    assert set(values) == {"slow", "fast"} and values[:2] == ["slow", "fast"]
    assert "hx-get" not in page.partition('id="compared"')[2].partition("</section>")[0]


@pytest.mark.slow
def test_best_is_the_lowest_loss_on_the_same_held_out_rows(trained, floor, alice, client_for):
    jobs = [
        trained("worse", losses=(2.0, 1.0), evaluation=1.2),
        trained("better", losses=(2.0, 1.0), evaluation=0.8),
    ]
    FineTuningJob.objects.update(training_file=jobs[0].training_file)

    page = text(client_for(alice).get(url(*jobs)))
    head = re.search(r"<thead>.*?</thead>", page.partition("Results of each")[2], re.DOTALL)

    assert head and head[0].count("Best") == 1
    assert head[0].index("worse") < head[0].index("better") < head[0].index("Best")


@pytest.mark.slow
def test_a_running_job_is_reloaded_with_its_cost_so_far(trained, floor, claim, alice, client_for):
    jobs = [trained("done", losses=(2.0, 1.0), evaluation=1.2), floor.job(suffix="running")]
    claim().start(total_steps=10).report(wire.StepCompleted, **step(4, 1.5) | {"training_seconds": 600.0})
    cost = usd(get_progress(job=FineTuningJob.objects.get(pk=jobs[1].pk), now=db_now()).spent_nano)
    client = client_for(alice)

    page = text(client.get(url(*jobs)))
    part = text(client.get(url(*jobs), headers={"HX-Request": "true"}))
    exported = b"".join(client.get("/jobs/export").streaming_content).decode()

    assert 'hx-trigger="every 10s"' in page and "<html" not in part and "Settings that differ" not in part
    assert f'data-label="running">{cost}</td>' in page and f'data-label="running">{cost}</td>' in part
    assert f"{float(cost[1:])}" in exported.splitlines()[1] and cost != "$0.00"

    FineTuningJob.objects.filter(pk=jobs[1].pk).update(status="pausing")
    FineTuningJob.objects.filter(pk=jobs[1].pk).update(status="paused")
    assert "every 10s" not in text(client.get(url(*jobs)))


@pytest.mark.slow
def test_jobs_on_other_rows_have_no_best(trained, alice, client_for):
    jobs = [trained(name, losses=(2.0, 1.0), evaluation=1.0) for name in ("a", "b")]

    assert "Best is the lowest" not in text(client_for(alice).get(url(*jobs)))


@pytest.mark.slow
def test_other_curves_are_chosen_by_the_address_and_may_be_missing(floor, trained, alice, client_for):
    jobs = [trained(name, losses=(2.0, 1.0), evaluation=1.0) for name in ("a", "b")]
    client = client_for(alice)

    assert "No values yet" in text(client.get(url(*(floor.job(suffix=name) for name in "cd"))))
    assert "Evaluation loss by step" in text(client.get(url(*jobs, metric="valid_loss")))
    assert "Training loss by step" in text(client.get(url(*jobs, metric="nonsense")))


@pytest.mark.slow
def test_one_job_or_none_asks_for_more_and_a_foreign_one_is_unknown(trained, rival, alice, client_for, charlie):
    job = trained("a", losses=(2.0,), evaluation=1.0)

    assert "Choose two to eight" in text(client_for(alice).get(url(job)))
    assert "Choose two to eight" in text(client_for(alice).get("/jobs/compare"))
    assert client_for(charlie).get(url(job)).status_code == 404


@pytest.mark.slow
def test_at_most_eight_are_compared(floor, alice, client_for):
    jobs = [floor.job(suffix=f"job-number-{number}") for number in range(9)]

    page = text(client_for(alice).get(url(*jobs)))

    assert "job-number-7" in page and "job-number-8" not in page and "Showing the first 8 of 9" in page


def test_a_smoothed_curve_begins_at_its_first_value_and_follows():
    curve = smoothed([(1, 4.0), (2, 2.0), (3, 2.0)])

    assert curve[0] == (1, 4.0)
    assert 2.0 < curve[2][1] < curve[1][1] < 4.0


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [1e-9, 2e-9], [1e9, -1e9]])
def test_any_values_can_be_drawn(values):
    chart = draw_overlay([("a", list(enumerate(values))), ("b", [])])

    assert chart is not None
    assert all(0 <= tick.y <= chart.height for tick in chart.y_ticks)
    assert [curve.last for curve in chart.curves] == [values[-1], None]


def test_nothing_is_drawn_of_nothing():
    assert draw_overlay([("a", [])]) is None
