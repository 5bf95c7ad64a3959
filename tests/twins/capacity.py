"""An engine of elastic pools in memory, a node that the twins of real ones are asked for, and the limits of a pool."""

from apps.contracts.worker_api import EnrollRequest
from apps.finetuning.models import CapacityNode, GpuPool, PoolCapacity, Worker
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity.port import CapacityError, ListedNode, NodeRequest
from apps.finetuning.pools.capacity.reconciliation import reconcile_pool
from apps.finetuning.pools.capacity.settings import set_capacity
from apps.serving.models import Replica
from apps.serving.operations import accept_address, register_replica
from tests.support.attempts import age_nodes

SLURM = {"partition": "gpu", "install_dir": "/opt/anneal", "work_dir": "/tmp/anneal"}
ONCE = "one-time-token"
PREFIX = "anneal-pool-" + "1" * 26 + "-"
NODE = NodeRequest(
    name=f"{PREFIX}node-" + "2" * 26,
    pool="pool_x",
    token=ONCE,
    internal_url="https://internal",
    idle_seconds=60,
    gpus=2,
)


class Engine:
    """An engine in memory that may fail before or after it carries out a request."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeRequest] = {}
        self.started: list[str] = []
        self.fails_before = self.fails_after = self.fails_to_list = self.is_full = self.has_no_spot = False
        self.on_list = lambda: None

    def request(self, node: NodeRequest) -> str:
        if self.fails_before:
            raise CapacityError("no partition")
        assert node.name not in self.nodes
        self.nodes[node.name] = node
        self.started.append(node.name)
        if self.fails_after:
            raise CapacityError("the answer was lost")
        return node.name[-8:]

    def list_nodes(self, *, prefix: str) -> dict[str, ListedNode]:
        if self.fails_to_list:
            raise CapacityError("squeue failed")
        self.on_list()
        names = [name for name in self.nodes if name.startswith(prefix)]
        return {
            name: ListedNode(
                external_id=name[-8:], is_waiting=self.is_full or (self.has_no_spot and bool(self.nodes[name].is_spot))
            )
            for name in names
        }

    def release(self, *, external_ids) -> None:
        self.nodes = {name: node for name, node in self.nodes.items() if name[-8:] not in external_ids}

    def enrol(self, name: str) -> Worker:
        node = self.nodes[name]
        request = EnrollRequest(token=node.token, kind=node.kind, hostname=name, gpus=(), software={})
        return operations.enroll(request=request)[0]

    def serve(self, name: str, *, in_progress: int = 0, is_ready: bool = True) -> Replica:
        """Enrol a node's replica, which stays in touch for the test."""
        worker = self.enrol(name)
        base_model = CapacityNode.objects.get(worker=worker).fleet.base_model
        replica, _ = register_replica(worker_id=worker.pk, base_model=base_model, url=f"http://{name[-8:]}:8003")
        accept_address(replica=replica, by="user_test")
        Replica.objects.filter(pk=replica.pk).update(is_ready=is_ready, observed_at="2100-01-01T00:00Z")
        report(replica, in_progress=in_progress)
        return replica


def report(replica: Replica, *, in_progress: int) -> None:
    """Have the replica report that it works on so many requests."""
    Replica.objects.filter(pk=replica.pk).update(load={"running": in_progress, "waiting": 0})


def limit(pool: GpuPool, **changes) -> PoolCapacity:
    """Let Slurm start up to two nodes of the pool, apart from the changes."""
    values = {
        "kind": "slurm", "minimum": 0, "maximum": 2, "gpus_per_node": 1, "idle_seconds": 60, "node_nano_per_hour": 0,
        "budget_nano_per_hour": None, "settings": SLURM,
    }  # fmt: skip
    return set_capacity(pool=pool, by="user_test", **values | changes)


def look(pool: GpuPool, *, later: float = 0.0) -> list[str]:
    """Let the pool's capacity follow its work, `later` in seconds; return the states of its nodes."""
    if later:
        age_nodes(later)
    PoolCapacity.objects.update(busy_until=None)
    reconcile_pool(pool_id=pool.pk)
    return list(CapacityNode.objects.order_by("requested_at", "pk").values_list("status", flat=True))
