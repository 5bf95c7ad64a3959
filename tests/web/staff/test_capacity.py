"""The capacity of a pool in the console."""

from apps.core.database.clock import db_now
from apps.finetuning.models import CapacityNode, PoolCapacity
from apps.finetuning.quotes.pool_facts import find_open_pools
from tests.support.pages import text

BODY = {
    "kind": "slurm", "minimum": "0", "maximum": "4", "gpus_per_node": "2", "idle_seconds": "120", "node_usd": "2.50",
    "budget_usd": "7.5", "partition": "gpu", "install_dir": "/opt/anneal", "work_dir": "/scratch/anneal",
}  # fmt: skip


def test_an_operator_makes_a_pool_elastic_and_sees_its_nodes_with_their_reasons(olga, client_for, floor):
    console, page = client_for(olga), f"/staff/pools/{floor.pool.pk}"

    assert console.post(f"{page}/capacity", BODY).status_code == 302
    capacity = PoolCapacity.objects.get()
    assert (capacity.kind, capacity.maximum, capacity.gpus_per_node) == ("slurm", 4, 2)
    assert (capacity.node_nano_per_hour, capacity.budget_nano_per_hour) == (2_500_000_000, 7_500_000_000)
    assert capacity.settings["partition"] == "gpu"

    PoolCapacity.objects.update(wanted=3, problem="sbatch failed: invalid account")
    node = CapacityNode.objects.create(pool=floor.pool, status="starting", reason="Pending: Resources")
    shown = text(console.get(page))
    for said in (node.name, "Pending: Resources", "sbatch failed: invalid account", "3 wanted, at most 4"):
        assert said in shown

    for field, value in (
        ("maximum", "9" * 30), ("minimum", "5"), ("partition", "-p x"), ("work_dir", "relative"), ("install_dir", ""),
        ("gres", "a\x00b"), ("node_usd", "NaN"), ("node_usd", "0"), ("kind", "cloud"), ("budget_usd", "2"),
    ):  # fmt: skip
        refused = console.post(f"{page}/capacity", BODY | {field: value})
        assert refused.status_code == 422
        assert field in refused.context["capacity_form"].errors, (field, refused.context["capacity_form"].errors)
    assert PoolCapacity.objects.get().maximum == 4


def test_a_pool_without_workers_can_be_quoted_if_it_starts_them(olga, client_for, floor):
    floor.worker.revoked_at = floor.worker.created_at
    floor.worker.save()
    client_for(olga).post(f"/staff/pools/{floor.pool.pk}/capacity", BODY)

    [state] = find_open_pools(base_model=floor.base_model, methods={"lora"}, now=db_now()).states(
        family="llama", method="lora"
    )
    assert (state.live_workers, state.gpus_per_worker, state.starts_workers) == (0, 2, True)

    # A smaller machine that joined by hand takes nothing away.
    floor.worker.revoked_at, floor.worker.gpus = None, floor.worker.gpus[:1]
    floor.worker.save()
    [state] = find_open_pools(base_model=floor.base_model, methods={"lora"}, now=db_now()).states(
        family="llama", method="lora"
    )
    assert (state.live_workers, state.gpus_per_worker) == (1, 2)
