"""Under the web's own role: what a tenant sees of a shared queue; deploying works without operator rights."""

import pytest

from apps.adapters.models import AdapterVersion
from apps.billing.models import LedgerEntry, LedgerTransaction, UsageEvent
from apps.billing.usage.metering import UsageRecord, rate_usage, record_usage
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.core.ids import new_id
from apps.core.messages.outbox import deliver_due
from apps.finetuning.models import FineTuningJob
from apps.finetuning.quotes.pool_facts import seconds_ahead
from apps.serving import operations
from apps.serving.models import Deployment, Replica
from apps.serving.placements import replan
from tests.factories.accounts import make_key
from tests.factories.finetuning import TrainingSetup, give_credit, make_job
from tests.support.sdk import openai_client


def test_another_tenants_work_counts_in_the_queue_without_being_seen(floor, rival, charlie):
    ours = floor.job()
    give_credit(rival)
    theirs = make_job(rival, floor.base_model)

    with tenant(organization=rival):
        assert list(FineTuningJob.objects.values_list("pk", flat=True)) == [theirs.pk]
        assert seconds_ahead(pool=floor.pool) == pytest.approx(
            ours.estimate["run_seconds_p50"] + theirs.estimate["run_seconds_p50"]
        )
    outsider = openai_client(make_key(rival, charlie))
    assert outsider.fine_tuning.jobs.retrieve(theirs.id).model_extra["queue_position"] == 2


@pytest.mark.slow
def test_a_tenant_undeploys_and_deletes_its_model_through_the_outbox(floor, organization, key, claim):
    floor.job()
    claim().start().succeed(floor.base_model)
    deliver_due()
    replica, _ = operations.register_replica(worker_id=floor.worker.pk, base_model=floor.base_model, url="unix:///x")
    version = AdapterVersion.objects.get()
    replan(base_model_id=floor.base_model.pk, now=db_now())
    assert [a.lora_name for a in operations.desired_state(replica=replica).adapters] == [version.lora_name]
    record_answer(floor, version, key.key.pk)
    rate_usage()
    billed = billing_rows(organization)
    assert all(billed.values())

    deleted = openai_client(key).models.delete(version.model_name)
    deliver_due()

    assert deleted.deleted
    after = Replica.objects.get(pk=replica.pk)
    assert after.generation > replica.generation
    assert operations.desired_state(replica=after).adapters == ()
    assert Deployment.objects.get().removed_at is not None
    assert AdapterVersion.objects.get(pk=version.pk).model_name == version.model_name
    assert billing_rows(organization) == billed


def record_answer(floor: TrainingSetup, version: AdapterVersion, key_id: str) -> None:
    """One answer of the adapter, priced."""
    prices = {
        f"{way}_price_id": set_price(
            sku=f"inference:{way}:{floor.base_model.name}",
            unit="tokens",
            price_nano=100,
            per=1,
            by="system",
            now=db_now(),
        ).pk
        for way in ("input", "output")
    }
    answer = UsageRecord(
        id=new_id("use"), organization_id=floor.organization.pk, key_id=key_id, model_name=version.model_name,
        adapter_version_id=version.pk, slice_id="", input_tokens=11, cached_input_tokens=0, output_tokens=7,
        finish="stop", latency_ms=12, first_token_ms=4, occurred_at=db_now(), **prices,
    )  # fmt: skip
    assert record_usage(records=[answer]).new == 1


def billing_rows(organization) -> dict[str, list[dict]]:
    """What was used and what was posted for it, as it stands."""
    models = (UsageEvent, LedgerTransaction, LedgerEntry)
    return {
        model.__name__: list(model.objects.filter(organization=organization).order_by("pk").values())
        for model in models
    }


@pytest.mark.slow
def test_a_name_is_never_given_twice(floor, organization, claim):
    names = set()
    for _ in range(2):
        floor.job(suffix="triage")
        claim().start().succeed(floor.base_model)
        version = AdapterVersion.objects.order_by("-created_at").first()
        names.add(version.model_name)
        operations.delete_model(organization=organization, model_name=version.model_name, by="user_x", now=db_now())

    assert len(names) == 2
