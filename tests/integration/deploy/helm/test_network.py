"""The network policies of deploy/helm: who may call whom, worked out from the rendered policies alone."""

from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

import pytest

from apps.finetuning.pools.capacity.manifests import REPLICA_PORT
from scripts.processes import PROGRAMS
from tests.integration.deploy.helm.chart import (
    HELM_FOLDER,
    SERVICES,
    Helm,
    Object,
    Rendering,
    container_of,
    objects_of,
    pods,
    variables,
)

# Of the example's values: the service of compose in its place, its address and its port.
OUTSIDE = {"database": ("postgres", "10.0.0.5", 5432), "redis": ("redis", "10.0.0.6", 6379)}
OUTSIDE["objects"] = ("minio", "10.0.0.7", 443)


class Network:
    """Decides about connections as Kubernetes does: both sides must allow them, and no rule means no limit."""

    def __init__(self, rendered: Rendering) -> None:
        self._policies = [
            each["spec"] for each in rendered
            if each["kind"] == "NetworkPolicy" and each["metadata"].get("namespace") is None
        ]  # fmt: skip
        self.labels = {owner["metadata"]["name"]: pod["metadata"]["labels"] for owner, pod in pods(rendered)}

    def allows(self, caller: str, called: str, port: int) -> bool:
        return self._leaves(caller, called, port) and self._enters(caller, called, port)

    def leaves_for(self, caller: str, address: str, port: int) -> bool:
        """Return whether a pod may call an address outside."""
        return any(
            _has_port(rule, port) and any(_has_address(peer, address) for peer in rule["to"])
            for rule in self._rules(caller, "Egress", "egress")
        )

    def _leaves(self, caller: str, called: str, port: int) -> bool:
        return self._matches(self._rules(caller, "Egress", "egress"), "to", called, port)

    def _enters(self, caller: str, called: str, port: int) -> bool:
        return self._matches(self._rules(called, "Ingress", "ingress"), "from", caller, port)

    def _matches(self, rules: list[Object], side: str, other: str, port: int) -> bool:
        return any(
            _has_port(rule, port) and (side not in rule or any(self._is_pod(peer, other) for peer in rule[side]))
            for rule in rules
        )

    def _rules(self, name: str, kind: str, field: str) -> list[Object]:
        selected = [each for each in self._policies if kind in each["policyTypes"]
                    and each["podSelector"]["matchLabels"].items() <= self.labels[name].items()]  # fmt: skip
        assert selected, f"{name} is not limited"
        return [rule for each in selected for rule in each.get(field, [])]

    def _is_pod(self, peer: Object, name: str) -> bool:
        here = "namespaceSelector" not in peer and "podSelector" in peer
        return here and peer["podSelector"]["matchLabels"].items() <= self.labels[name].items()


def _has_port(rule: Object, port: int) -> bool:
    return "ports" not in rule or port in [each["port"] for each in rule["ports"]]


def _has_address(peer: Object, address: str) -> bool:
    block = peer.get("ipBlock")
    return bool(block) and ip_address(address) in ip_network(block["cidr"]) and not any(
        ip_address(address) in ip_network(part) for part in block.get("except", [])
    )  # fmt: skip


@pytest.fixture(scope="module")
def network(rendered: Rendering) -> Network:
    return Network(rendered)


def test_programs_call_each_other_where_they_must_and_nowhere_else(network: Network) -> None:
    ports = {"web": 8000, "internal": 8001, "gateway": 8002, "replica-llama-8b": 8003, "egress": 3128, "nginx": 443}
    names = [name for name in network.labels if name not in ("trainer-cpu", "replica-qwen")]

    calls = {(a, b) for a in names for b, port in ports.items() if a != b and network.allows(a, b, port)}

    assert {(a, b) for a, b in calls if b != "nginx"} == {
        ("nginx", "web"), ("nginx", "gateway"), ("web", "gateway"), ("celery-batches", "gateway"),
        ("gateway", "replica-llama-8b"), ("trainer-h100", "internal"), ("replica-llama-8b", "internal"),
        ("trainer-h100", "egress"), ("replica-llama-8b", "egress"), ("trainer-h100", "gateway"),
    }  # fmt: skip


def test_no_connection_is_allowed_that_compose_has_no_network_for(network: Network) -> None:
    for program in [each for each in PROGRAMS if each.role]:
        for networks, (service, address, port) in OUTSIDE.items():
            shares = set(SERVICES[program.name]["networks"]) & set(SERVICES[service]["networks"])
            assert network.leaves_for(program.name, address, port) <= bool(shares), (program.name, networks)


@pytest.mark.parametrize("worker", ["trainer-h100", "trainer-cpu", "replica-llama-8b", "replica-qwen"])
def test_a_worker_reaches_no_database_and_nothing_outside_but_files_and_its_queue(
    worker: str, network: Network
) -> None:
    reached = {name for name, (_, address, port) in OUTSIDE.items() if network.leaves_for(worker, address, port)}

    assert reached == {"objects"} | ({"redis"} if worker.startswith("trainer") else set())
    for address in ("1.1.1.1", "169.254.169.254", "10.96.0.1"):
        assert not network.leaves_for(worker, address, 443)


@pytest.mark.parametrize("address", ["169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "10.1.2.3"])
def test_no_program_reaches_a_metadata_service_or_a_private_address(address: str, network: Network) -> None:
    assert [name for name in network.labels if network.leaves_for(name, address, 80)] == []


def test_processes_that_serve_or_carry_out_reach_the_collector_of_traces_and_no_worker_does(network: Network) -> None:
    reached = {name for name in network.labels if network.leaves_for(name, "10.0.0.8", 4318)}

    assert reached - {"beat"} == {name for name, one in SERVICES.items() if "traces" in one.get("networks", ())}


def test_programs_of_compose_with_a_way_out_have_one(network: Network) -> None:
    out = {name for name in network.labels if network.leaves_for(name, "1.1.1.1", 443)}

    assert out == {name for name, one in SERVICES.items() if "outbound" in one.get("networks", ())}


def test_only_the_process_that_starts_nodes_reaches_the_clusters(network: Network) -> None:
    assert [name for name in network.labels if network.leaves_for(name, "10.96.0.1", 443)] == ["celery"]


@pytest.mark.parametrize("trainer", ["trainer-h100", "trainer-cpu"])
def test_a_trainer_reaches_the_judge_at_the_address_that_it_gets(
    trainer: str, network: Network, rendered: Rendering
) -> None:
    given = variables(container_of(rendered, "internal")[1])["ANNEAL_WORKER_GATEWAY_URL"]["value"]

    found = urlsplit(given)
    assert found.hostname == "gateway.platform.svc" and found.port
    assert network.allows(trainer, "gateway", found.port)


def test_gateways_reach_replicas_outside_and_machines_outside_the_worker_api(helm: Helm) -> None:
    outside = '[{"ipBlock":{"cidr":"10.9.0.0/24"}}]'
    options = [f"--set-json=network.{name}.peers={outside}" for name in ("nodes", "replicas")]
    rendered = objects_of(
        helm(
            "template", f"--values={HELM_FOLDER / 'example.yaml'}", *options,
            "--set=internalUrl=https://workers.example.com",
            r"--set=settings.ANNEAL_REPLICA_ADDRESSES=10.9.0.0/24\,gpu.example.com",
        )
    )  # fmt: skip

    network = Network(rendered)
    assert [name for name in network.labels if network.leaves_for(name, "10.9.0.4", 8003)] == ["gateway"]
    given = variables(container_of(rendered, "internal")[1])
    assert given["ANNEAL_INTERNAL_URL"]["value"] == "https://workers.example.com"
    listed = given["ANNEAL_REPLICA_ADDRESSES"]["value"].split(",")
    assert listed[-2:] == ["10.9.0.0/24", "gpu.example.com"] and len(listed) == 5  # three replicas of the example
    trainer = variables(container_of(rendered, "trainer")[1])
    assert trainer["ANNEAL_INTERNAL_URL"]["value"] == "http://internal.platform.svc:8001"


def test_gateways_reach_the_nodes_that_serve(rendered: Rendering) -> None:
    [policy] = [each["spec"] for each in rendered if each["metadata"]["name"] == "anneal-to-nodes-that-serve"]
    [nodes] = [
        each["spec"] for each in rendered if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "nodes"
    ]

    assert policy["podSelector"]["matchLabels"] == {"anneal/reaches-replicas": "true"}
    assert policy["egress"][0]["ports"] == [{"protocol": "TCP", "port": REPLICA_PORT}]
    assert {"ports": [{"protocol": "TCP", "port": REPLICA_PORT}]} in nodes["ingress"]


@pytest.mark.parametrize(
    ("called", "port", "spaces"),
    [
        ("internal", 8001, ["anneal", "monitoring"]), ("gateway", 8002, ["anneal"]), ("web", 8000, ["monitoring"]),
    ],
)  # fmt: skip
def test_nodes_reach_what_workers_call_and_prometheus_what_it_scrapes(
    called: str, port: int, spaces: list[str], rendered: Rendering
) -> None:
    [policy] = [each["spec"] for each in rendered if each["metadata"]["name"] == f"anneal-from-callers-of-{called}"]
    [rule] = policy["ingress"]

    found = [peer["namespaceSelector"]["matchLabels"] for peer in rule["from"] if "namespaceSelector" in peer]
    assert [space["kubernetes.io/metadata.name"] for space in found] == spaces
    assert rule["ports"] == [{"protocol": "TCP", "port": port}]
