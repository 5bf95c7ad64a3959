"""`anneal apply`: a model as code, trained when it changed and promoted when it passes its gates."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from anneal import manifest
from anneal.commands import apply as command
from anneal.failures import Failure

from apps.contracts.evaluation import ConfidenceInterval
from apps.core.database.clock import db_now
from apps.datasets.models import TokenCount
from apps.finetuning.models import FineTuningJob
from apps.finetuning.pools.operations import record_probe
from apps.finetuning.usage.quotas import set_quota
from apps.serving.models import Alias
from tests.factories.catalog import make_base_model
from tests.factories.datasets import jsonl
from tests.factories.finetuning import probe_report
from tests.factories.serving import load, make_replica
from tests.support.attempts import REPORT

TEXT = """
name: support-bot
dataset: rows.jsonl
held_out: held-out.jsonl
model: anneal-demo
recipe: {epochs: 2, learning_rate: 1e-3}
gates: {exact_match: {min: 0.5}}
alias: production
"""
GATES = "gates: {exact_match: {min: 0.5}}\n"


@pytest.fixture
def folder(tmp_path: Path, checking_server, monkeypatch) -> Path:
    (tmp_path / "anneal.yaml").write_text(TEXT)
    (tmp_path / "rows.jsonl").write_bytes(jsonl())
    (tmp_path / "held-out.jsonl").write_bytes(jsonl(30)[len(jsonl(15)) :])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(floor, claim):
    """Return a function that ends the waiting job, with a report."""
    replica = make_replica(floor.base_model, "http://127.0.0.1:1")

    def run(report=REPORT) -> str:
        job = FineTuningJob.objects.latest("created_at")
        claim().start().succeed(job.base_model, report=report)
        job.refresh_from_db()
        is_usual = job.base_model == floor.base_model
        load(job.adapter_version, replica if is_usual else make_replica(job.base_model, "http://127.0.0.1:2"))
        return str(job.adapter_version.model_name)

    return run


@pytest.mark.slow
def test_a_change_is_priced_trained_once_and_promoted_if_it_beats_production(anneal, folder, train) -> None:
    rehearsed = anneal("apply", "--dry-run", "--json")
    assert rehearsed.exit_code == 0 and not FineTuningJob.objects.exists(), rehearsed.errors
    assert rehearsed.json["hold_usd"] and "dataset" in [each["name"] for each in rehearsed.json["changes"]]

    started, again = anneal("apply", "--yes", "--json"), anneal("apply", "--yes", "--json")
    assert (started.json["started"], again.json["started"], again.json["changes"]) == (True, False, [])
    first = train()
    done = anneal("apply", "--wait", "--yes", "--json")
    assert done.exit_code == 0 and done.json["promoted"], done.output
    assert Alias.objects.get().version.model_name == first
    assert "nothing to do" in anneal("apply").output

    (folder / "rows.jsonl").write_bytes(jsonl(14))
    grown = anneal("apply", "--yes", "--json")
    assert [each["name"] for each in grown.json["changes"]] == ["dataset"] and grown.json["started"]
    train()
    level = anneal("apply", "--json")
    assert level.exit_code == 1 and not level.json["promoted"], "it is only as good as production"
    assert [(gate["name"], gate["passed"]) for gate in level.json["gates"]] == [
        ("exact_match", True),
        ("beat_current", False),
    ]
    assert Alias.objects.get().version.model_name == first


@pytest.mark.slow
@pytest.mark.parametrize("is_better", [False, True])
def test_another_base_model_must_beat_production_and_leaves_its_alias(anneal, folder, floor, train, is_better) -> None:
    anneal("apply", "--yes")
    first = train()
    assert "The alias is new" in anneal("apply").output
    other = make_base_model("anneal-other")
    report = probe_report(floor.base_model)
    record_probe(worker=floor.worker, base_model=other, method="lora", report=msgspec.to_builtins(report))
    for counted in TokenCount.objects.all():
        counted.pk, counted.base_model = None, other
        counted.save()
    (folder / "anneal.yaml").write_text(TEXT.replace("model: anneal-demo", "model: anneal-other"))
    assert anneal("apply", "--yes").exit_code == 0
    value = ConfidenceInterval(value=0.95, low=0.92, high=0.97) if is_better else REPORT.comparisons[0].tuned
    train(msgspec.structs.replace(REPORT, comparisons=(msgspec.structs.replace(REPORT.comparisons[0], tuned=value),)))

    ended = anneal("apply", "--json")

    assert [(gate["name"], gate["passed"]) for gate in ended.json["gates"]][1] == ("beat_current", is_better)
    assert ended.json["promoted"] == is_better and ended.exit_code == (0 if is_better else 1)
    if is_better:
        assert ended.json["alias"] == "ft:anneal-other:acme:support-bot:production"
        assert f"ft:anneal-demo:acme:support-bot:production still points to {first}" in ended.json["note"]


@pytest.mark.slow
def test_gates_are_checked_without_an_alias_too(anneal, folder, train) -> None:
    text = TEXT.replace("alias: production\n", "").replace("min: 0.5", "min: 0.999")
    (folder / "anneal.yaml").write_text(text)
    anneal("apply", "--yes")
    train()

    ended = anneal("apply", "--json")

    assert (ended.exit_code, ended.json["promoted"]) == (1, False), ended.errors
    assert [(gate["name"], gate["passed"]) for gate in ended.json["gates"]] == [("exact_match", False)]


def test_a_job_without_a_model_is_named_in_one_sentence() -> None:
    wanted = manifest.Manifest(name="x", dataset="x", model="x", alias="z", beat_current=False)
    job = {"id": "ftjob-1", "status": "succeeded", "fine_tuned_model": None}

    with pytest.raises(Failure, match="ftjob-1 succeeded without a model"):
        command._ended(SimpleNamespace(), wanted, job, {}, wait=False)


def test_of_equal_files_the_newest_is_trained_on() -> None:
    files = [{"id": name, "sha256": "a", "status": "processed"} for name in ("file-new", "file-old")]  # newest first

    assert manifest.find_files(SimpleNamespace(pages=lambda *_, **__: iter(files))) == {"a": "file-new"}


@pytest.mark.parametrize(
    ("change", "named"),
    [("held_out: held-out.jsonl\n", "held_out"), ("name: support-bot", "name"), ("model: anneal-demo", "model")],
)
def test_a_wrong_manifest_is_refused_with_the_member_that_is_wrong(anneal, folder, network, change, named) -> None:
    (folder / "anneal.yaml").write_text(TEXT.replace(change, ""))

    refused = anneal("apply", "--yes")

    assert refused.exit_code == 2 and named in refused.errors and network.paths("POST") == []


def test_a_rehearsed_job_that_would_be_refused_ends_with_the_status_of_refusals(anneal, folder, floor) -> None:
    set_quota(organization=floor.organization, by="system", now=db_now(), queued_jobs=0)

    refused = anneal("apply", "--dry-run", "--json")

    assert refused.exit_code == 5 and "It would not start" in refused.json["note"], refused.errors
    assert not FineTuningJob.objects.exists()


@pytest.mark.slow
def test_an_alias_that_moved_or_has_a_canary_is_left_as_it_is(anneal, folder, train, monkeypatch) -> None:
    def improved() -> None:
        (folder / "rows.jsonl").write_bytes(jsonl(14))
        assert anneal("apply", "--yes", "--json").json["started"]

    text = TEXT.replace("held_out: held-out.jsonl\n", "").replace(GATES, "beat_current: false\n")
    (folder / "anneal.yaml").write_text(text)
    anneal("apply", "--yes")
    train()
    assert anneal("apply", "--json").json["promoted"]
    improved()
    newest = train()
    first = Alias.objects.get().version
    Alias.objects.update(canary_version=first, canary_percent=10)

    testing = anneal("apply", "--json")
    assert not testing.json["promoted"] and "End that canary" in testing.json["note"]

    Alias.objects.update(canary_version=None, canary_percent=0)

    def check_slowly(*given: object) -> list[object]:
        Alias.objects.update(canary_version=first, canary_percent=5)
        return []

    monkeypatch.setattr(command, "_gates", check_slowly)
    since = anneal("apply", "--json")
    assert since.exit_code != 0 and "canary" in since.errors
    assert Alias.objects.get().version == first and first.model_name != newest


def measured(
    value: float, *, name: str = "exact_match", is_higher_better: bool = True, width: float = 0.01
) -> dict[str, object]:
    tuned = {"value": value, "low": value - width, "high": value + width}
    return {"comparisons": [{"name": name, "tuned": tuned, "is_higher_better": is_higher_better}]}


def test_production_is_beaten_only_on_the_same_measure_and_not_by_chance() -> None:
    wanted = manifest.Manifest(name="x", dataset="x", model="x", held_out="y", alias="z")

    def beats(new: dict, old: dict, *, is_comparable: bool = True, **given: bool) -> bool:
        return manifest.check_gates(wanted, new, current=old, is_comparable=is_comparable, **given)[0].passed

    assert beats(measured(0.9), measured(0.8)) and not beats(measured(0.8), measured(0.8))
    assert not beats(measured(0.9), measured(0.8), is_comparable=False)
    assert not beats(measured(0.9, width=0.1), measured(0.8, width=0.1))
    assert beats(measured(0.9), measured(0.8), has_other_base=True)
    assert not beats(measured(0.9, name="token_accuracy"), measured(0.8, name="token_accuracy"), has_other_base=True)
    (by_chance,) = manifest.check_gates(
        wanted, measured(0.9, width=0.1), current=measured(0.8, width=0.1), is_comparable=True
    )
    assert "may be chance" in by_chance.text and "0.9 (0.8 to 1)" in by_chance.text
    assert not beats(measured(0.9), measured(0.8, name="regex"))
    lower = [measured(value, name="loss", is_higher_better=False) for value in (1.0, 2.0)]
    assert beats(*lower) and not beats(*lower[::-1])
    assert command._short("a" * 64) == "a" * 12


def test_the_machines_of_a_manifest_are_asked_for_and_train_nothing_anew() -> None:
    wanted = manifest.Manifest(name="x", dataset="x", model="x", pool="h200", node_count=2)

    body = manifest.request_of(wanted, {}, {"dataset": "file-x"})

    assert body["compute"] == {"pool": "h200", "node_count": 2}
    assert not any("node_count" in name for name in body["metadata"])


@pytest.mark.slow
def test_two_runs_at_once_start_one_job(anneal, folder, monkeypatch) -> None:
    monkeypatch.setattr(command, "manifest_jobs", lambda api, wanted: iter(()))  # neither sees the other's job

    first, second = anneal("apply", "--yes", "--json"), anneal("apply", "--yes", "--json")
    (folder / "anneal.yaml").write_text(TEXT + "pool: local-cpu\n")
    other = anneal("apply", "--yes")

    assert first.json["job"] == second.json["job"] == FineTuningJob.objects.get().pk
    assert other.exit_code == 5 and "Another run" in other.errors


@pytest.mark.slow
def test_a_job_that_was_cancelled_is_started_again(anneal, folder) -> None:
    first = anneal("apply", "--yes", "--json")
    assert anneal("jobs", "cancel", first.json["job"]).exit_code == 0

    second = anneal("apply", "--yes", "--json")

    assert second.json["started"] and second.json["job"] != first.json["job"]
