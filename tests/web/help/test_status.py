"""The status page: what works now of what an organization may use."""

import datetime

import pytest

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.finetuning.models import Worker
from apps.serving.models import ReplicaFleet
from tests.factories.serving import make_replica
from tests.support.pages import text


@pytest.mark.slow
def test_the_status_says_which_pools_take_jobs_and_which_models_answer(floor, organization, client_for, vera):
    client = client_for(vera)

    def page() -> str:
        return text(client.get("/status"))

    assert "Jobs start here." in page() and "No replica is ready." in page()
    assert "Parts do not work" in page()

    place = {"pool": floor.pool, "base_model": floor.base_model, "region_id": floor.pool.region_id}
    fleet = ReplicaFleet.objects.create(able_at=db_now(), **place)
    assert "The next request starts a replica" in page() and "Everything works" in page()
    fleet.delete()

    make_replica(floor.base_model, "http://10.0.0.1")
    assert "It and its adapters answer." in page() and "Everything works" in page()

    Worker.objects.update(last_seen_at=db_now() - datetime.timedelta(hours=1))
    assert "Jobs wait until a worker is online." in page() and "Parts do not work" in page()

    Organization.objects.filter(pk=organization.pk).update(regions=["elsewhere"])
    assert floor.pool.name not in page() and "No GPU pool is open" in page()
    assert "No replica is ready." in page()
