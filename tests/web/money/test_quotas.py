"""The page of quotas: what is used, held and left, and the allowances of members and labels."""

import pytest

from apps.core.database.clock import db_now
from apps.finetuning.models import Allowance
from apps.finetuning.usage.quotas import set_quota
from tests.support.pages import text


@pytest.mark.slow
def test_an_owner_sets_and_ends_what_a_label_may_use(client_for, organization, alice, vera, rival, charlie):
    set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=4)
    owner, viewer = client_for(alice), client_for(vera)
    sent = {"scope": "label", "label": "team=search", "concurrent_gpus": "2", "gpu_hours": "1.5"}
    sent["tokens_per_minute"] = "50000"

    too_much = owner.post("/quotas", sent | {"concurrent_gpus": "5"})
    assert too_much.status_code == 422 and "quota of your organization is 4" in text(too_much)
    assert owner.post("/quotas", sent).status_code == 302
    allowance = Allowance.objects.get()
    assert (allowance.label, allowance.concurrent_gpus) == ({"team": "search"}, 2)
    assert (allowance.gpu_seconds_per_month, allowance.queued_jobs) == (5400, None)
    assert (allowance.requests_per_minute, allowance.tokens_per_minute) == (None, 50_000)

    page = text(owner.get("/quotas?scope=label&target=team=search"))
    assert "0 of 2" in page and "At most 0 in the last 30 days." in page and 'value="1.5"' in page
    assert "50,000" in page and 'value="50000"' in page and "0 in the last 30 days. At most 0 in one hour." in page
    shown = text(viewer.get("/quotas"))
    assert "team=search" in shown and "50,000" in shown and "Set allowance" not in shown
    assert viewer.post("/quotas", sent).status_code == 403
    assert "50,000" not in text(client_for(charlie).get("/quotas"))
    assert client_for(None).get("/quotas").status_code == 302

    assert owner.post("/quotas", {"scope": "member", "queued_jobs": "1"}).status_code == 422
    stored = owner.post("/quotas", sent | {"storage_gb": "1.5"})
    assert stored.status_code == 422 and "Only a member can have a limit of storage." in text(stored)
    assert owner.post("/quotas", {"scope": "member", "member": alice.pk, "storage_gb": "1.5"}).status_code == 302
    page = text(owner.get(f"/quotas?scope=member&target={alice.pk}"))
    assert "0 B of 1.5 GB" in page and 'value="1.5"' in page and "0 B stored in the last 30 days." in page
    asked = text(owner.get(f"/quotas/end?allowance={allowance.pk}"))
    assert "the label team=search" in asked
    owner.post("/quotas/end", {"allowance": allowance.pk, "confirm": "the label team=search"})
    assert not Allowance.objects.filter(pk=allowance.pk).exists()
