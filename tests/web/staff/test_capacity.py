"""The capacity of a pool in the console."""

import pytest

from apps.core.database.clock import db_now
from apps.core.models import AuditEntry
from apps.finetuning.models import CapacityNode, CapacityToken, GpuPool, PoolCapacity
from apps.finetuning.quotes.pool_facts import find_open_pools
from apps.serving.models import ReplicaFleet
from tests.support.pages import text
from tests.twins.kubernetes import make_certificate

BODY = {
    "kind": "slurm", "minimum": "0", "maximum": "4", "gpus_per_node": "2", "idle_seconds": "120", "node_usd": "2.50",
    "budget_usd": "7.5", "partition": "gpu", "install_dir": "/opt/anneal", "work_dir": "/scratch/anneal",
}  # fmt: skip
TOKEN = "operators-own-token"


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_operator_mixes_on_demand_and_spot_nodes(olga, client_for, floor):
    console, page = client_for(olga), f"/staff/pools/{floor.pool.pk}"
    mixed = BODY | {
        "on_demand_nodes": "1", "spot_node_usd": "0.9", "spot_partition": "spot", "replaces_spot": "on",
    }  # fmt: skip
    refused = console.post(f"{page}/capacity", mixed)
    assert "Mark the pool as spot first" in text(refused)

    GpuPool.objects.update(is_spot=True, interruptions_per_hour=0.2)
    for field, value in (("spot_partition", ""), ("spot_node_usd", ""), ("on_demand_nodes", "5")):
        refused = console.post(f"{page}/capacity", mixed | {field: value})
        assert refused.context["capacity_form"].errors.keys() == {field}
    assert console.post(f"{page}/capacity", mixed).status_code == 302
    capacity = PoolCapacity.objects.get()
    assert (capacity.on_demand_nodes, capacity.spot_node_nano_per_hour, capacity.replaces_spot) == (
        1,
        900_000_000,
        True,
    )

    CapacityNode.objects.create(pool=floor.pool, status="starting", is_spot=True)
    shown = console.get(page)
    assert shown.context["capacity_form"]["on_demand_nodes"].value() == 1 and ">Spot<" in shown.content.decode()


@pytest.mark.slow
def test_an_operator_opens_a_pool_that_borrows_machines(olga, client_for, floor):
    console = client_for(olga)
    body = {
        "name": "low", "gpu_type": "cpu", "region": "local", "price_policy": "firm", "memory_gib": "8",
        "borrows_from": floor.pool.pk,
    }  # fmt: skip
    silent = console.post("/staff/pools", body)
    created = console.post("/staff/pools", body | {"interruptions_per_hour": "0.2"})
    page = console.get(created["Location"])

    assert silent.context["form"].errors.keys() == {"interruptions_per_hour"}
    assert GpuPool.objects.get(name="low").borrows_from == floor.pool
    shown = text(page)
    assert "Jobs of this pool run on machines of local-cpu" in shown
    assert "Generate join command" not in shown and "Save capacity" not in shown
    listed = console.get("/staff/pools")
    assert "Borrow machines" in text(listed) and "No worker" not in text(listed)
    assert [row.live for row in listed.context["rows"]] == [1, 1]
    refused = console.post(f"{created['Location']}/token", {"kind": "trainer"}, follow=True)
    assert "Add the machine to local-cpu." in text(refused)


@pytest.mark.slow
def test_an_operator_has_replicas_start_on_request_and_sees_them(olga, client_for, floor):
    console, page = client_for(olga), f"/staff/pools/{floor.pool.pk}"
    body = {
        "base_model": floor.base_model.pk, "minimum": "0", "maximum": "3", "requests_per_replica": "8",
        "idle_seconds": "300",
    }  # fmt: skip
    refused = console.post(f"{page}/fleet", body)
    assert refused.status_code == 422
    assert "Choose what starts the machines of this pool first." in text(refused)
    assert not ReplicaFleet.objects.exists()

    console.post(f"{page}/capacity", BODY)
    for field, value in {"base_model": "bm_none", "minimum": "4", "maximum": "-1", "idle_seconds": "1"}.items():
        refused = console.post(f"{page}/fleet", body | {field: value})
        assert refused.status_code == 422
        assert field in refused.context["fleet_form"].errors, (field, refused.context["fleet_form"].errors)
    assert console.post(f"{page}/fleet", body).status_code == 302
    fleet = ReplicaFleet.objects.get()
    assert (fleet.base_model, fleet.maximum, fleet.requests_per_replica) == (floor.base_model, 3, 8)
    assert AuditEntry.objects.filter(action="pool.fleet_set").exists()

    CapacityNode.objects.create(pool=floor.pool, fleet=fleet, status="starting")
    shown = text(console.get(page))
    assert "Replicas that start on request" in shown and f"Replica of {floor.base_model.display_name}" in shown
    assert "0, 3" in shown and "never" in shown
    opened = console.get(page, {"fleet": fleet.pk}).context["fleet_form"]
    assert {name: str(opened[name].value()) for name in body} == body
    assert console.get(page, {"fleet": "none"}).context["fleet_form"]["maximum"].value() == 1


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


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("ca") / "key.pem")


def kubernetes(ca, /, **changes):
    return {
        "kind": "kubernetes", "maximum": "4", "gpus_per_node": "2", "api_url": "https://10.0.0.1:6443", "ca": ca,
        "token": TOKEN, "namespace": "anneal", "image": "registry.example.com/gpu:1", "gpu_resource": "nvidia.com/gpu",
        "queue": "gpus", "node_selector": "gpu=h100,zone=a", "service_account": "pull", "cpu": "8", "memory": "64Gi",
    } | changes  # fmt: skip


@pytest.mark.slow
def test_an_operator_connects_a_cluster_and_the_token_is_never_shown(olga, client_for, floor, ca, caplog):
    console, page = client_for(olga), f"/staff/pools/{floor.pool.pk}"
    assert 'value="nvidia.com/gpu"' in console.get(page).content.decode()

    def save(**changes):
        return console.post(f"{page}/capacity", kubernetes(ca, **changes))

    for field, value in (
        ("token", ""), ("token", "two words"), ("token", "ü"), ("ca", "PEM"), ("ca", ""), ("ca", "ü"),
        ("ca", "x" * 30_000),
        ("ca", ca.replace("CERTIFICATE", "PRIVATE KEY") + ca), ("api_url", "http://10.0.0.1"), ("api_url", "https://a/path"),
        ("api_url", "https://169.254.169.254"), ("api_url", "https://[fd00:ec2::254]"), ("api_url", "https://u@a"),
        ("api_url", "https://a:99999"), ("api_url", "https://a:0"), ("api_url", "https://[::::]"),
        ("namespace", "A"), ("namespace", "a/../b"),
        ("image", "a b"), ("image", ""), ("queue", "-q"), ("gpu_resource", "gpu"), ("node_selector", "gpu"),
        ("node_selector", "a=b c"), ("service_account", "a_b"), ("cpu", "many"), ("memory", "1 GB"), ("user_id", "0"),
        ("minutes", "1"), ("kind", "cloud"),
    ):  # fmt: skip
        refused = save(**{field: value})
        assert refused.status_code == 422
        assert refused.context["capacity_form"].errors.keys() == {field}, (field, value)
        assert TOKEN not in refused.content.decode()
    assert not CapacityToken.objects.exists()
    assert not PoolCapacity.objects.exists()

    assert save().status_code == 302
    capacity = PoolCapacity.objects.get()
    assert (capacity.kind, capacity.settings["queue"], capacity.settings["cpu"]) == ("kubernetes", "gpus", "8")
    assert TOKEN.encode() not in bytes(CapacityToken.objects.get().token_sealed)
    answer = console.get(page)
    shown, groups = answer.content.decode(), answer.context["capacity_form"].groups
    assert "https://10.0.0.1:6443" in shown
    assert [group.is_open for group in groups] == [True, False, True, True, False]
    assert [group.needed for group in groups[2:]] == [("api_url", "image"), ("namespace",), ("project",)]
    for text_ in (shown, str(PoolCapacity.objects.values()), str(AuditEntry.objects.values()), caplog.text):
        assert TOKEN not in text_

    # It stays if the field is empty, and goes to no other server or authority.
    sealed = bytes(CapacityToken.objects.get().token_sealed)
    assert save(token="", image="other:2", gpu_resource="", ca=ca.replace("\n", "\r\n")).status_code == 302
    assert bytes(CapacityToken.objects.get().token_sealed) == sealed
    assert 'value="nvidia.com/gpu"' not in console.get(page).content.decode()
    refused = save(token="", api_url="https://10.0.0.2:6443")
    assert refused.context["capacity_form"].errors.keys() == {"token"}
    assert PoolCapacity.objects.get().settings["api_url"] == "https://10.0.0.1:6443"
    assert save(token="another-token").status_code == 302
    assert bytes(CapacityToken.objects.get().token_sealed) != sealed

    CapacityNode.objects.create(pool=floor.pool, status="starting")
    assert save(namespace="other").context["capacity_form"].errors.keys() == {"namespace"}
    assert save(kind="static").context["capacity_form"].errors.keys() == {"kind"}
    CapacityNode.objects.all().delete()
    assert save(kind="static").status_code == 302
    assert not CapacityToken.objects.exists()


@pytest.mark.slow
def test_an_operator_connects_dstack_and_its_token_goes_to_no_other_engine(olga, client_for, floor, ca):
    console, page = client_for(olga), f"/staff/pools/{floor.pool.pk}"

    def save(**changes):
        body = {
            "kind": "dstack", "maximum": "4", "gpus_per_node": "2", "api_url": "https://dstack.example.com",
            "token": TOKEN, "project": "anneal", "image": "registry.example.com/gpu:1", "gpu": "H100:80GB",
            "fleet": "h100", "spot_policy": "spot",
        }  # fmt: skip
        return console.post(f"{page}/capacity", body | changes)

    for field, value in (
        ("token", ""), ("api_url", "http://dstack.example.com"), ("api_url", "https://169.254.169.254"),
        ("project", ""), ("project", "a/../b"), ("image", ""), ("gpu", "H100:2"), ("fleet", "a b"),
        ("spot_policy", "cheap"), ("minutes", "1"), ("ca", "PEM"),
    ):  # fmt: skip
        refused = save(**{field: value})
        assert refused.status_code == 422
        assert refused.context["capacity_form"].errors.keys() == {field}, (field, value)
    assert not PoolCapacity.objects.exists()
    assert save().status_code == 302
    settings = PoolCapacity.objects.get().settings
    assert (settings["project"], settings["spot_policy"], "ca" in settings) == ("anneal", "spot", False)
    answer = console.get(page)
    assert [group.is_open for group in answer.context["capacity_form"].groups] == [True, False, True, False, True]
    assert TOKEN not in answer.content.decode()

    assert save(token="", gpu="").status_code == 302
    for changes in ({"api_url": "https://other.example.com"}, {"ca": ca}):
        assert save(token="", **changes).context["capacity_form"].errors.keys() == {"token"}
    CapacityNode.objects.create(pool=floor.pool, status="starting")
    assert save(project="other").context["capacity_form"].errors.keys() == {"project"}


def test_only_an_operator_connects_a_cluster_and_has_replicas_started(alice, bob, charlie, client_for, floor, ca):
    for person in (alice, bob, charlie, None):
        for address, body in (("capacity", kubernetes(ca)), ("fleet", {"base_model": floor.base_model.pk})):
            answer = client_for(person).post(f"/staff/pools/{floor.pool.pk}/{address}", body)
            assert answer.status_code in (302, 403, 404)
            assert "/staff/" not in answer.headers.get("Location", "").partition("?")[0]
    assert not PoolCapacity.objects.exists()
    assert not CapacityToken.objects.exists()
    assert not ReplicaFleet.objects.exists()
