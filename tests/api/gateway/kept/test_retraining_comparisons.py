"""A retraining compares both models through the gateway, and is charged like any run of an eval."""

import msgspec
import pytest

from apps.accounts.models import default_project_id
from apps.adapters.models import AdapterVersion
from apps.batches import worker
from apps.contracts.hyperparameters import Hyperparameters
from apps.core.database.clock import db_now
from apps.core.messages.outbox import deliver_due
from apps.finetuning.jobs.retraining.plans import EXACT
from apps.finetuning.lifecycle import RETRAINING_OPEN
from apps.finetuning.models import FineTuningJob, Retraining, RetrainingPlan
from apps.serving.aliases import point_alias
from tests.factories.datasets import chat_row, jsonl_of, make_ready_version
from tests.factories.money import USD
from tests.factories.retraining import tick
from tests.factories.serving import Tenant, make_adapter
from tests.support.gateway.processes import usage_of, wait_until
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db
HALF = 6


def make_comparable(tenant: Tenant) -> Retraining:
    """A retraining whose job has just succeeded, and rows of which both models pass one half."""
    production = AdapterVersion.objects.select_related("adapter__base_model").get(model_name=tenant.model_name)
    rows = jsonl_of(*[chat_row("greet", "Hello there.")] * HALF, *[chat_row("leave", "Bye.")] * HALF)
    file = make_ready_version(tenant.organization, rows, dataset_name="held-out")
    now, owned = db_now(), {"organization": tenant.organization, "created_by": tenant.key.key.pk}
    job = FineTuningJob.objects.create(
        status="succeeded", finished_at=now, base_model=production.adapter.base_model, training_file=file, seed=1,
        method="lora", hyperparameters=msgspec.to_builtins(Hyperparameters()), suffix="bot",
        adapter_version=make_adapter(tenant.organization, production.adapter.base_model),
        project_id=default_project_id(tenant.organization), **owned,
    )  # fmt: skip
    plan = RetrainingPlan.objects.create(
        name="nightly", source_job=job, dataset=file.dataset, held_out=file.dataset, min_new_rows=10**6, max_nano=USD,
        alias=point_alias(version=production, name="production", by=tenant.key.key.pk, now=now), min_gain_points=0.0,
        testing_criteria=[msgspec.to_builtins(EXACT)], acts_as=tenant.key.key.pk, **owned,
    )  # fmt: skip
    return Retraining.objects.create(
        plan=plan, trigger="request", trigger_key="one", status="training", training_file=file, held_out_file=file,
        job=job, max_nano=plan.max_nano, **owned,
    )  # fmt: skip


@pytest.mark.slow
def test_both_models_answer_each_row_once_and_are_graded_by_the_rows_own_answers(tenant, engine) -> None:
    engine.scripts["leave"] = Script(tokens=("See", " you."))
    make_comparable(tenant)

    def work() -> Retraining | None:
        found = tick()
        deliver_due(lane="data-small")
        worker.work(seconds=10)
        deliver_due(lane="data-small")
        return None if found.status in RETRAINING_OPEN else found

    ended = wait_until(work, "the comparison has not ended", seconds=60)

    assert (ended.status, ended.code) == ("kept", "not_better"), ended.reason
    result = ended.held_out_result
    assert (result["rows"], result["new_passed"], result["old_passed"]) == (2 * HALF, HALF, HALF)
    assert (result["only_new"], result["only_old"], result["difference"]["value"]) == (0, 0, 0)
    wait_until(lambda: len(usage_of(tenant)) == 4 * HALF, "not charged once for each answer")
    names = {event.model_name for event in usage_of(tenant)}
    assert names == {tenant.model_name, ended.job.adapter_version.model_name}
    assert all(event.key_id == tenant.key.key.pk for event in usage_of(tenant))
