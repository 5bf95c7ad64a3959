"""The tabs of a job's page: log, events, dataset and checkpoints."""

import html
import re

import pytest

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.finetuning.models import JobEvent
from tests.support.attempts import step


@pytest.fixture
def show(client_for, alice):
    """Return a function that returns a page as text."""
    client = client_for(alice)
    return lambda url, **headers: html.unescape(client.get(url, headers=headers).content.decode())


@pytest.fixture
def attempt(floor, claim):
    """An attempt that has logged one line of each level and saved two checkpoints."""
    floor.job(suffix="triage")
    attempt = claim().start()
    for level, message in (("info", "Rehearsed the longest batch"), ("warn", "Memory runs low"), ("error", "Lost it")):
        attempt.report(wire.LogLine, level=level, message=message)
    for number, loss in ((4, 1.25), (6, 1.5)):
        attempt.report(wire.StepCompleted, **step(number, 2.0))
        attempt.report(wire.EvaluationCompleted, step=number, valid_loss=loss)
        attempt.checkpoint(step=number, seconds=4.0)
    return attempt


@pytest.fixture
def url(attempt) -> str:
    return f"/jobs/{attempt.run.job_id}"


@pytest.mark.slow
def test_the_address_says_which_tab_is_shown_and_an_unknown_one_is_the_overview(show, url):
    for address, label in (
        ("", "Overview"),
        ("?tab=log", "Log"),
        ("?tab=events", "Events"),
        ("?tab=nonsense", "Overview"),
    ):
        assert (
            re.search(r'aria-current="page"[^>]*>\s*(\w+)', show(url + address).partition('aria-label="This job"')[2])[
                1
            ]
            == label
        )


@pytest.mark.slow
def test_the_log_has_the_trainers_lines_oldest_first_and_nothing_else(show, url):
    page = show(f"{url}?tab=log")

    lines = re.findall("Rehearsed the longest batch|Memory runs low|Lost it", page)
    assert lines == ["Rehearsed the longest batch", "Memory runs low", "Lost it"]
    assert "Checkpoint saved" not in page


@pytest.mark.slow
def test_the_log_is_filtered_by_level_and_searched_with_what_the_address_asks(show, url):
    warnings, found = show(f"{url}?tab=log&level=warn"), show(f"{url}?tab=log&q=LONGEST+rehearsed")

    assert "Memory runs low" in warnings and "Rehearsed" not in warnings and "Lost it" not in warnings
    assert "Rehearsed the longest batch" in found and "Memory" not in found
    assert "No line matches." in show(f"{url}?tab=log&q=nothing")
    assert f'href="{url}/log?level=warn"' in warnings


@pytest.mark.slow
def test_a_long_log_has_pages_that_neither_repeat_nor_miss_a_line(floor, organization, show, client_for, alice):
    job = floor.job()
    JobEvent.objects.bulk_create(
        JobEvent(
            id=f"ftevent-log-{number}", organization=organization, job=job, sequence=1_000 + number,
            type="log" if number % 2 else "metrics", message=f"line {number:04}",
        )
        for number in range(1, 901)
    )  # fmt: skip

    def lines(page: str) -> list[str]:
        return re.findall(r"line \d{4}", page)

    newest = show(f"/jobs/{job.pk}?tab=log")
    older = show(re.search(r'href="([^"]*before=\d+)"', newest)[1])
    oldest = show(re.search(r'href="([^"]*before=\d+)"', older)[1])
    forward = show(re.search(r'href="([^"]*after=\d+)"', oldest)[1])

    assert lines(oldest) + lines(older) + lines(newest) == [f"line {number:04}" for number in range(1, 901, 2)]
    assert lines(forward) == [f"line {number:04}" for number in range(101, 501, 2)]
    assert "&after=" not in newest and "&before=" not in oldest
    text = b"".join(client_for(alice).get(f"/jobs/{job.pk}/log").streaming_content).decode()
    assert (len(text.splitlines()), text.splitlines()[0][-9:]) == (450, "line 0001")


def test_the_log_is_downloaded_one_line_for_each_message(attempt, url, client_for, vera):
    attempt.report(wire.LogLine, level="warn", message="two\nlines")

    answer = client_for(vera).get(f"{url}/log?level=warn")

    text = b"".join(answer.streaming_content).decode()
    assert [line[26:] for line in text.splitlines()] == ["WARN  Memory runs low", "WARN  two lines"]
    assert answer.headers["Content-Disposition"].startswith("attachment")


@pytest.mark.slow
def test_events_are_changes_of_state_and_messages_the_newest_first(show, url):
    page = show(f"{url}?tab=events")

    assert re.findall(r"Checkpoint saved at step \d|Created fine-tuning job", page) == [
        "Checkpoint saved at step 6", "Checkpoint saved at step 4", "Created fine-tuning job",
    ]  # fmt: skip
    assert "Memory runs low" not in page and "training loss=" not in page


def test_the_api_lists_a_log_line_as_a_message(attempt, api_client, key):
    events = api_client(key).get(f"/v1/fine_tuning/jobs/{attempt.run.job_id}/events").json()["data"]

    [line] = [event for event in events if event["message"] == "Memory runs low"]
    assert (line["type"], line["level"]) == ("message", "warn")


def test_the_dataset_tab_shows_each_file_with_its_tokens_and_first_rows(floor, show):
    job = floor.job(hyperparameters={"validation_share": 0.2})

    page = show(f"/jobs/{job.pk}?tab=dataset")

    assert f'href="/datasets/{job.training_file_id}?' in page
    assert "rows.jsonl" in page and "100, 20% held out for validation" in page
    assert "2,000, 500 in answers" in page
    assert page.count("Hello") == 3 and "assistant" in page


@pytest.mark.slow
def test_checkpoints_have_their_losses_and_the_best_one_is_marked(attempt, url, floor, show, client_for, vera):
    page = show(f"{url}?tab=checkpoints")

    rows = [row.partition("</tr>")[0] for row in page.partition("<tbody>")[2].split("<tr>")[1:]]
    assert [("Best" in row, "1.250" in row, "1.500" in row) for row in rows] == [
        (False, False, True),
        (True, True, False),
    ]
    assert "in the playground" in rows[0] and "Continue" not in rows[0]
    assert "in the playground" not in client_for(vera).get(f"{url}?tab=checkpoints").content.decode()
    attempt.finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="No room."))
    assert f"model={attempt.run.job.checkpoints.get(step=6).pk}" in show(f"{url}?tab=checkpoints")


@pytest.mark.parametrize(
    ("tab", "shown"),
    [("", "Attempts"), ("log", "Memory runs low"), ("events", "Checkpoint saved at step 6"), ("checkpoints", "Best")],
)
def test_the_news_of_a_tab_come_without_the_page(show, url, tab, shown):
    news = show(f"{url}?tab={tab}", **{"HX-Request": "true", "HX-Target": "div#tab-news"})

    assert shown in news
    assert "<html" not in news and 'id="tab-news"' not in news and 'id="job-state"' not in news


def test_the_page_is_loaded_again_when_the_job_is_over(attempt, url, client_for, alice):
    asked = {"HX-Request": "true", "HX-Target": "div#tab-news"}
    assert "HX-Refresh" not in client_for(alice).get(f"{url}?tab=log", headers=asked).headers

    attempt.finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="No room."))

    assert client_for(alice).get(f"{url}?tab=log", headers=asked).headers["HX-Refresh"] == "true"


@pytest.mark.slow
def test_samples_show_the_model_before_training_beside_the_newest_or_a_chosen_step(attempt, url, show):
    assert "No samples yet" in show(f"{url}?tab=samples")
    for number, answer in ((0, "<Hello>"), (4, "Refund"), (6, "Billing")):
        sample = wire.Sample(prompt="Charged twice", reference="billing", answer=answer)
        attempt.report(wire.SamplesGenerated, step=number, samples=(sample,))

    newest, chosen = show(f"{url}?tab=samples"), show(f"{url}?tab=samples&step=4")

    assert all(text in newest for text in ("Charged twice", "Base model", "<Hello>", "Billing", "Step 6"))
    assert "Refund" not in newest
    assert "Refund" in chosen and "Billing" not in chosen and "<Hello>" in chosen
    assert "Billing" in show(f"{url}?tab=samples&step=5")
    assert "Sample answers at step 6" in show(f"{url}?tab=events")
    news = show(f"{url}?tab=samples&step=4", **{"HX-Request": "true", "HX-Target": "div#tab-news"})
    steps = news.partition('<hx-partial hx-target="#sample-steps"')[2].partition("</hx-partial>")[0]
    assert re.findall(r'<option value="(\d+)"\s*(selected)?>', steps) == [("6", ""), ("4", "selected")]
    assert "hx-partial" not in chosen
