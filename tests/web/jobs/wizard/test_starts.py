"""Jobs that the wizard starts from an earlier job, or from a model that was trained here."""

import json
import re
from urllib.parse import urlencode

import pytest

from apps.adapters.models import AdapterVersion
from apps.contracts.hyperparameters import Method
from apps.core.database.clock import db_now
from apps.datasets.models import DatasetVersion
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.models import FineTuningJob
from apps.finetuning.runs.trackers import store_tracker_key
from apps.interfaces.web.wizard.draft import Draft
from apps.serving.aliases import point_alias
from tests.factories.datasets import make_ready_version
from tests.factories.serving import load, make_adapter, make_replica
from tests.support.pages import text
from tests.web.pages import WIZARD_URL, launch, shown


def test_a_duplicate_keeps_the_settings_that_have_no_field(floor, organization, chosen, page, client_for, bob) -> None:
    own = {"lora_dropout": 0.2, "target_modules": ["q_proj", "v_proj"], "warmup_ratio": 0.1, "weight_decay": 0.01}
    asked = {"base_model": chosen["model"], "training_file": chosen["dataset"], "method": Method.LORA}
    request = JobRequest(**asked, hyperparameters=own | {"epochs": 7})
    job = create_job(organization=organization, request=request, by=bob.pk, now=db_now())
    again = Draft.of_job(job)

    method, review = page(again.choices | {"step": "method"}), page(again.choices | {"pool": floor.pool.name})
    unknown = page(again.choices | {"step": "method", "settings": '{"lora_dropout": 9, "warmup_ratio": 0.1}'})
    damaged = page(again.choices | {"step": "method", "settings": "[" * 500})
    copy = launch(client_for(bob), review, but=job, settings=again.get("settings"))

    assert "You set some of these in an earlier job." in method and "Use our choices instead" in method
    assert "This model doesn't take your values for: Adapter dropout." in unknown
    assert "You set some of these" not in damaged and '<input type="hidden" name="settings"' in review
    assert re.search(r"<dt>Adapter dropout</dt><dd>0.2.*?changed", review) and '"warmup_ratio": 0.1' in review
    assert {name: copy.hyperparameters[name] for name in own} == own
    assert '"warmup_ratio": 0.1' in text(client_for(bob).get(f"/jobs/{job.pk}"))


@pytest.mark.slow
def test_an_own_version_is_trained_further_with_its_shape(floor, organization, chosen, page, client_for, bob) -> None:
    version = make_adapter(organization, floor.base_model)

    models = page({"dataset": chosen["dataset"], "step": "model"})
    method = page(chosen | {"model": version.model_name, "step": "method", "lora_rank": "64"})
    settings = json.dumps({"target_modules": ["v_proj"], "warmup_ratio": 0.1})  # of an earlier job, without a field
    review = page(chosen | {"model": version.model_name, "pool": floor.pool.name, "settings": settings})
    job = launch(client_for(bob), review, settings=settings)

    assert f'value="{version.model_name}"' in models and "Continue from one of your adapters" in models
    cards = re.findall(r'name="method" value="(\w+)"', method)
    assert cards == ["lora", "qlora"] and "The same as in the model that this job continues." in method
    assert f"continues {version.model_name}" in review
    assert (job.hyperparameters["lora_rank"], job.hyperparameters["target_modules"]) == (8, ["q_proj"])
    assert job.hyperparameters["warmup_ratio"] == 0.1
    assert job.requested["start_from"]["version"] == version.pk
    assert urlencode({"model": version.model_name}) in Draft.of_job(job).url()
    AdapterVersion.objects.filter(pk=version.pk).update(deleted_at=db_now())
    assert f"The model {version.model_name} no longer exists" in page(Draft.of_job(job).choices), (
        "no base model instead"
    )


@pytest.mark.slow
def test_a_job_reports_to_the_trackers_whose_keys_are_stored(
    floor, organization, chosen, page, client_for, bob
) -> None:
    asked = {"wandb": "triage", "mlflow": "elsewhere"}
    assert "Add a key under" in page(chosen | {"step": "method"})
    store_tracker_key(
        organization=organization, kind="wandb", secret="wandb-key-0123456789", url="", by=bob.pk, now=db_now()
    )

    method = page(chosen | asked | {"step": "method"})
    review = page(chosen | asked | {"pool": floor.pool.name})
    job = launch(client_for(bob), review)

    assert shown(method, "wandb") == "triage"
    assert "W&B, triage" in review and "elsewhere" not in re.search(r"Reports to.*?</dl>", review)[0]
    assert job.requested["integrations"] == [{"type": "wandb", "wandb": {"project": "triage"}}]
    assert "wandb=triage" in Draft.of_job(job).url()
    assert "at most 128 characters" in page(chosen | {"wandb": "x" * 129, "pool": floor.pool.name}, status=422)


@pytest.mark.slow
def test_what_no_form_shows_is_read_from_the_job_that_is_repeated(floor, organization, client_for, bob, page) -> None:
    store_tracker_key(
        organization=organization, kind="wandb", secret="wandb-key-0123456789", url="", by=bob.pk, now=db_now()
    )
    tracked = {"type": "wandb", "wandb": {"project": "triage", "name": "nightly", "entity": "acme", "tags": ["a"]}}
    marks = {"apply.name": "support-bot", "imported_from": "ftjob-1"}  # by which commands find this job alone
    job = floor.job(metadata={"team": "search"} | marks, integrations=[tracked])
    draft = Draft.of_job(job).with_changes({"pool": floor.pool.name})

    review = page(draft.choices)
    answer = client_for(bob).post(WIZARD_URL, dict(draft.choices) | {"cap_nano": f"{10**12}"})
    again = FineTuningJob.objects.get(pk=answer.headers["location"].rpartition("/")[2])
    client_for(bob).post(WIZARD_URL, dict(draft.with_changes({"labels": "none"}).choices) | {"cap_nano": f"{10**12}"})

    assert "W&B, acme/triage" in review and "<code>team=search</code>" in review
    assert '"metadata": {\n    "team": "search"' in review
    assert (again.metadata, again.labels) == ({"team": "search"}, {"team": "search"})
    assert again.requested["integrations"] == job.requested["integrations"] == [tracked]
    unlabelled = FineTuningJob.objects.exclude(pk__in=[job.pk, again.pk]).get()
    assert (unlabelled.metadata, unlabelled.requested["integrations"]) == ({}, [tracked])


@pytest.mark.parametrize(
    ("gone", "heading", "sentence"),
    [
        ("dataset", "Choose a dataset", "The training file gone.jsonl was deleted or is hidden from you."),
        ("validation", "Choose a dataset", "The validation file gone.jsonl was deleted or is hidden from you."),
        ("model", "Choose a base model", "The model retired no longer exists or is hidden from you."),
        ("alias", "Choose a base model", "no longer exists or is hidden from you."),
    ],
)
def test_a_draft_opens_without_what_is_gone_and_says_so(
    gone, heading, sentence, floor, organization, chosen, page, client_for, bob
) -> None:
    deleted = make_ready_version(organization, filename="gone.jsonl")
    DatasetVersion.objects.filter(pk=deleted.pk).update(status="deleted", deleted_at=db_now())
    adapter = make_adapter(organization, floor.base_model)
    load(adapter, make_replica(floor.base_model, "unix:///nowhere"))
    alias = point_alias(version=adapter, name="production", by=bob.pk, now=db_now())  # may move: no start point
    name = "model" if gone == "alias" else gone
    value = {"model": "retired", "alias": alias.model_name}.get(gone, deleted.pk)

    opened = page(chosen | {name: value})
    launched = client_for(bob).post(WIZARD_URL, chosen | {name: value, "cap_nano": "1000000000"}, follow=True)

    assert launched.status_code == 200
    for body in (opened, text(launched)):
        assert f"<h1>{heading}</h1>" in body and sentence in body
        assert f'name="{name}" value="{value}"' not in body
    assert not FineTuningJob.objects.exists()
