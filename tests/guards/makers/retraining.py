"""Objects of a tenant that are about retraining."""

from apps.finetuning.models import Retraining, RetrainingPlan
from tests.guards.makers.tenants import Tenant


def retraining_plan(tenant: Tenant) -> str:
    plan = RetrainingPlan.objects.create(
        organization=tenant.organization, name=tenant.canary, source_job_id=tenant.ids["job"], min_new_rows=10**6,
        dataset_id=tenant.ids["dataset"], held_out_id=tenant.ids["dataset"], alias_id=tenant.ids["alias"],
        testing_criteria=[], max_nano=1, min_gain_points=0.0, acts_as=tenant.owner.pk, created_by=tenant.owner.pk,
    )  # fmt: skip
    Retraining.objects.create(
        organization=tenant.organization, plan=plan, trigger="request", trigger_key=tenant.canary, max_nano=1,
        created_by=tenant.owner.pk,
    )  # fmt: skip
    return plan.pk
