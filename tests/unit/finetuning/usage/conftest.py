"""Fixtures of elastic pools."""

import pytest

from apps.core.database.clock import db_now
from apps.finetuning.models import CapacityNode, PoolCapacity, Worker
from apps.finetuning.pools.capacity import reconciliation
from tests.support.attempts import age_nodes
from tests.twins.capacity import Engine, limit


@pytest.fixture
def engine(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(reconciliation, "engine_of", lambda _: engine)
    return engine


@pytest.fixture
def elastic(floor, engine):
    """Return a look at the pool, whose worker that joined by hand is gone."""
    Worker.objects.filter(pk=floor.worker.pk).update(revoked_at=db_now())
    limit(floor.pool)

    def look(*, later: float = 0) -> list[str]:
        if later:
            age_nodes(later)
        PoolCapacity.objects.update(busy_until=None)
        reconciliation.reconcile_pool(pool_id=floor.pool.pk)
        return list(CapacityNode.objects.order_by("requested_at", "pk").values_list("status", flat=True))

    return look
