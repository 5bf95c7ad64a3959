"""`anneal jobs`: the price before the start, following, steering and comparing."""

import json
import re
from decimal import Decimal
from io import StringIO

import pytest
from anneal import watching
from rich.console import Console

from apps.contracts import runs as wire
from apps.contracts.failures import FailureCode
from apps.contracts.worker_api import ClaimRequest
from apps.core.database.clock import db_now
from apps.core.money import usd_to_nano
from apps.finetuning.models import FineTuningJob, GpuPool, Worker
from apps.finetuning.runs import members
from apps.finetuning.usage import quotas
from tests.factories.finetuning import adapter_files, checkpoint_files, make_worker
from tests.factories.market import MACHINE_OFFER, Market
from tests.support.sdk import create

CREATE = ("jobs", "create", "--model", "anneal-demo")


def step(number: int, loss: float) -> dict[str, object]:
    return {
        "step": number, "total_steps": 10, "epoch": 0.1, "train_loss": loss, "learning_rate": 1e-3, "grad_norm": 1.0,
        "trained_tokens": 50, "tokens_per_second": 900.0, "training_seconds": 1.0,
    }  # fmt: skip


@pytest.fixture
def running(sdk, file_id, claim):
    job, attempt = create(sdk, file_id), claim()
    attempt.start()
    attempt.report(wire.StepCompleted, **step(1, 2.5))
    attempt.report(wire.StepCompleted, **step(2, 1.25))
    return job.id, attempt


@pytest.mark.slow
def test_a_job_starts_once_its_price_is_accepted_and_costs_no_more(anneal, file_id) -> None:
    declined = anneal(*CREATE, "--file", file_id, answer="n\n")
    silent = anneal(*CREATE, "--file", file_id)
    before = FineTuningJob.objects.count()
    accepted = anneal(*CREATE, "--file", file_id, "--epochs", "2", "--set", "learning_rate=0.001", answer="y\n")

    assert (declined.exit_code, silent.exit_code, before) == (1, 1, 0)
    assert "At most $" in declined.errors and "Start? [y/N]" in declined.errors and "--yes" in silent.errors
    assert accepted.exit_code == 0
    job = FineTuningJob.objects.get()
    assert job.hyperparameters["epochs"] == 2 and job.hyperparameters["learning_rate"] == 0.001
    assert f"anneal jobs watch {job.pk}" in accepted.output


@pytest.mark.slow
def test_the_cap_is_the_amount_that_was_shown(anneal, file_id) -> None:
    rehearsal = anneal(*CREATE, "--file", file_id, "--dry-run", "--json")
    job = anneal(*CREATE, "--file", file_id, "--yes", "--json")

    assert rehearsal.exit_code == 0 and rehearsal.json["would_start"]
    assert job.json["spend_cap_usd"] == rehearsal.json["hold_usd"]
    asked = FineTuningJob.objects.get().requested
    assert (asked["spend_cap_nano"], asked["shown_max_nano"]) == (None, usd_to_nano(Decimal(job.json["spend_cap_usd"])))


def test_a_request_in_a_file_is_sent_and_options_take_precedence(anneal, file_id, tmp_path) -> None:
    body = tmp_path / "job.json"
    body.write_text(
        json.dumps({"model": "anneal-demo", "training_file": "x", "seed": 3, "metadata": {"a": "b"}, "budget": None})
    )

    job = anneal("jobs", "create", "--body", str(body), "--file", file_id, "--metadata", "c=d", "--yes", "--json")

    assert (job.json["seed"], job.json["metadata"]) == (3, {"a": "b", "c": "d"})


def test_a_dry_run_in_a_file_creates_no_job(anneal, file_id, tmp_path, network) -> None:
    body = tmp_path / "job.json"
    body.write_text(json.dumps({"model": "anneal-demo", "training_file": file_id, "dry_run": True}))

    shown = anneal("jobs", "create", "--body", str(body), "--yes")

    assert shown.exit_code == 0 and "It would start" in shown.output
    assert len(network.paths("POST")) == 1 and not FineTuningJob.objects.exists()


@pytest.mark.slow
def test_a_job_on_several_machines_is_asked_for_and_what_their_network_takes_is_said(anneal, file_id, floor) -> None:
    make_worker(floor.pool, credential="annw_two")
    Worker.objects.update(offer=MACHINE_OFFER)
    words = (*CREATE, "--file", file_id, "--yes", "--nodes")

    priced = anneal("estimate", "--model", "anneal-demo", "--file", file_id, "--nodes", "2")
    rehearsed, refused = anneal(*words, "2", "--dry-run"), anneal(*words, "3")
    created = anneal(*words, "2")

    said = r"on 2 machines, whose network takes \d+% of the billed time"
    assert all(re.search(said, text) for text in (priced.output, rehearsed.output, created.errors))
    assert "It uses 2 GPUs on 2 machines" in rehearsed.output and re.search(r"Machines +2\n", created.output)
    assert refused.exit_code == 5 and "3 GPUs cannot share a batch of 8 rows evenly." in refused.errors
    job = FineTuningJob.objects.get()
    assert (job.gpu_count, job.node_count, job.requested["node_count"]) == (2, 2, 2)


def test_a_refusal_is_one_sentence_that_names_the_field(anneal, floor) -> None:
    words = (*CREATE, "--file", "file-unknown", "--yes")
    told, as_json = anneal(*words), anneal(*words, "--json")

    assert (told.exit_code, told.output) == (4, "") and "file-unknown" in told.errors and "{" not in told.errors
    assert json.loads(as_json.errors)["error"]["param"] == "training_file"


def test_wrong_words_are_refused_before_anything_is_sent(anneal, network, tmp_path) -> None:
    body = tmp_path / "job.json"
    body.write_text('{"lora": [8]}')
    wrong = [
        anneal(*CREATE),
        anneal(*CREATE, "--file", "f", "--epochs", "two"),
        anneal(*CREATE, "--file", "f", "--body", str(body)),
        anneal("jobs", "compare", "ftjob-1"),
        anneal(*CREATE, "--file", str(body)),
    ]

    assert [each.exit_code for each in wrong] == [2, 2, 2, 2, 2] and network.calls == []
    assert "--file" in wrong[0].errors and "--epochs" in wrong[1].errors
    assert "is a file here" in " ".join(wrong[4].errors.split())


@pytest.mark.slow
def test_a_watched_job_shows_its_steps_and_ends_with_its_model(anneal, running, floor) -> None:
    job_id, attempt = running
    attempt.succeed(floor.base_model)

    watched = anneal("jobs", "watch", job_id)
    lines = anneal("jobs", "watch", job_id, "--json").output.splitlines()

    assert watched.exit_code == 0
    assert "training loss=1.2500" in watched.output and "ft:anneal-demo:" in watched.output
    assert [json.loads(line)["object"] for line in lines][-2:] == ["fine_tuning.job.event", "fine_tuning.job"]


def test_ctrl_c_leaves_the_job_running_and_says_so(anneal, running, monkeypatch, reload_status) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching.time, "sleep", interrupt)

    watched = anneal("jobs", "watch", running[0])

    assert watched.exit_code == 130 and f"{running[0]} keeps running." in watched.errors
    assert reload_status(running[0]) == "running"


@pytest.fixture
def reload_status():
    return lambda job_id: FineTuningJob.objects.get(pk=job_id).status


@pytest.mark.slow
def test_logs_are_in_order_and_each_comes_once_when_followed(anneal, running, floor, network) -> None:
    job_id, attempt = running
    plain = [json.loads(line)["id"] for line in anneal("jobs", "logs", job_id, "--json").output.splitlines()]
    reads = [0]

    def end_at_the_third(request) -> bool:
        reads[0] += request.url.path.endswith(job_id)
        if reads[0] == 3:
            reads[0] += 1
            attempt.succeed(floor.base_model)
        return False

    network.cut = end_at_the_third
    followed = [json.loads(line)["id"] for line in anneal("jobs", "logs", "-f", job_id, "--json").output.splitlines()]

    assert plain == sorted(plain) and followed[: len(plain)] == plain
    assert len(followed) == len(set(followed)) > len(plain)
    assert len(anneal("jobs", "logs", job_id, "--tail", "2").output.splitlines()) == 2


@pytest.mark.slow
def test_a_job_is_paused_resumed_and_cancelled(anneal, running, reload_status) -> None:
    paused = anneal("jobs", "pause", running[0])
    early = anneal("jobs", "resume", running[0], "--yes")
    cancelled = anneal("jobs", "cancel", running[0], "--json")

    assert paused.exit_code == 0 and "pausing" in paused.output
    assert early.exit_code == 5 and "paus" in early.errors
    assert cancelled.exit_code == 0 and cancelled.json["id"] == running[0]


@pytest.mark.slow
def test_a_command_whose_answer_was_lost_acts_once(anneal, running, network) -> None:
    anneal("jobs", "pause", running[0])
    running[1].pause(step=2, seconds=2.0)
    network.is_forgetful = True

    resumed = anneal("jobs", "resume", running[0], "--max-cost", "$5", "--yes", "--json")

    assert (resumed.exit_code, resumed.json["status"]) == (0, "queued"), resumed.errors
    assert FineTuningJob.objects.get().runs.count() == 2


@pytest.mark.slow
def test_a_failed_job_is_started_again_with_the_suggested_change(anneal, running) -> None:
    running[1].finish(wire.Failed(code=FailureCode.OUT_OF_MEMORY, message="No room."))

    declined = anneal("jobs", "retry", running[0], answer="n\n")
    again = anneal("jobs", "retry", running[0], "--yes", "--json")

    assert declined.exit_code == 1 and "Start? [y/N]" in declined.errors
    assert again.exit_code == 0 and again.json["id"] != running[0]


def test_only_a_failed_job_is_retried(anneal, running, network) -> None:
    refused = anneal("jobs", "retry", running[0], "--yes")

    assert refused.exit_code == 5 and "only a failed job" in refused.errors
    assert network.paths("POST") == []


@pytest.mark.slow
def test_a_cap_that_is_no_finite_amount_is_refused_before_anything_is_sent(anneal, running, network) -> None:
    refused = [anneal("jobs", "resume", running[0], "--max-cost", cap, "--yes") for cap in ("nan", "inf")]

    assert [each.exit_code for each in refused] == [2, 2] and "--max-cost" in refused[0].errors
    assert network.paths("POST") == []


@pytest.mark.slow
def test_jobs_are_compared_by_what_differs(anneal, running, sdk, file_id) -> None:
    other = create(sdk, file_id, extra_body={"lora": {"rank": 8}})

    found = anneal("jobs", "compare", running[0], other.id, "--json").json
    shown = anneal("jobs", "compare", running[0], other.id).output

    assert "lora_rank" in found["differing"] and "epochs" not in found["differing"]
    assert [job["train_loss"] for job in found["data"]] == [1.25, None]
    assert "lora_rank" in shown and "1.25" in shown


@pytest.mark.slow
def test_checkpoints_are_listed_and_one_is_deployed(anneal, floor, running) -> None:
    job, attempt = running
    rank = attempt.claimed.spec.hyperparameters.lora_rank
    attempt.checkpoint(2, 2.0, files=checkpoint_files() | adapter_files(floor.base_model, rank=rank))

    listed, table = anneal("jobs", "checkpoints", job, "--json"), anneal("jobs", "checkpoints", job)
    served, missing = (
        anneal("jobs", "checkpoints", job, "--serve", "2"),
        anneal("jobs", "checkpoints", job, "--serve", "9"),
    )

    [checkpoint] = listed.json["data"]
    assert checkpoint["step_number"] == 2 and checkpoint["fine_tuned_model_checkpoint"] in table.output
    assert served.exit_code == 0 and f"{checkpoint['fine_tuned_model_checkpoint']} is " in served.output, served.errors
    assert missing.exit_code == 4 and "no checkpoint of step 9" in missing.errors


@pytest.mark.slow
def test_jobs_are_listed_over_several_pages(anneal, sdk, file_id, monkeypatch) -> None:
    monkeypatch.setattr("anneal.api._PAGE", 1)
    ids = [create(sdk, file_id).id for _ in range(2)]

    assert [job["id"] for job in anneal("jobs", "list", "--json").json["data"]] == ids[::-1]
    assert len(anneal("jobs", "list", "--limit", "1", "--json").json["data"]) == 1


def test_a_terminal_shows_progress_and_the_curve_of_the_loss(anneal, running, monkeypatch) -> None:
    drawn = StringIO()
    monkeypatch.setattr(watching, "console", lambda: Console(file=drawn, force_terminal=True, width=100))
    anneal("jobs", "cancel", running[0])
    running[1].finish(wire.Stopped(reason=wire.StopReason.CANCELLED))

    watched = anneal("jobs", "watch", running[0])

    assert watched.exit_code == 1 and "cancelled" in watched.output
    assert "step 2 of 10" in drawn.getvalue() and "█▁" in drawn.getvalue() and "1.2500" in drawn.getvalue()


def test_a_curve_has_the_width_of_a_line() -> None:
    assert watching.curve([4.0, 2.0, 1.0, 1.0]) == "█▃▁▁"
    assert len(watching.curve([float(n) for n in range(500)])) == 60
    assert watching.curve([]) == ""


@pytest.mark.slow
def test_a_waiting_job_moves_to_a_pool_that_was_listed(anneal, organization, network) -> None:
    market = Market(organization)
    quotas.set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=8)
    GpuPool.objects.exclude(name__in=("h100", "h200")).update(is_open=False)
    words = ("jobs", "create", "--model", market.base_model.name, "--file", market.version.pk, "--pool", "h100")
    job = [anneal(*words, "--yes", "--json").json["id"] for _ in range(2)][1]
    members.claim(worker=Worker.objects.get(pool__name="h100"), request=ClaimRequest())

    listed = anneal("jobs", "move", job)
    elsewhere = anneal("jobs", "move", job, "--to", "h100", "--yes")
    declined = anneal("jobs", "move", job, "--to", "h200", answer="n\n")
    network.is_forgetful = True
    moved = anneal("jobs", "move", job, "--to", "h200", "--yes", "--json")

    assert "h200" in listed.output and "1 × " in listed.output and "0 s" in listed.output
    assert elsewhere.exit_code == 5 and "would not start sooner on h100" in elsewhere.errors
    assert declined.exit_code == 1 and re.search(r"At most \$\d+\.\d\d\. Move to h200\?", declined.errors)
    assert (moved.json["pool"], moved.json["status"]) == ("h200", "queued")
