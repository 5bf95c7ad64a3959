"""Kubernetes against a stateful twin of its API, over TLS: the adapter, and a pool that goes to a node and back."""

import json
import logging
from pathlib import Path

import msgspec
import pytest
import yaml

from apps.contracts.worker_api import EnrollRequest
from apps.core.database.clock import db_now
from apps.core.secrets.sealing import place_of, seal
from apps.finetuning.models import CapacityNode, CapacityToken, PoolCapacity, Run, Worker
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity import api_client, kubernetes
from apps.finetuning.pools.capacity.kubernetes import Kubernetes
from apps.finetuning.pools.capacity.manifests import KubernetesSettings, job_manifest
from apps.finetuning.pools.capacity.port import CapacityError, NodeRequest
from apps.finetuning.pools.capacity.settings import set_capacity
from apps.finetuning.runs import claims
from gpu_workers.common.config import read_config, read_engine_config
from tests.twins.capacity import NODE, ONCE, PREFIX, look
from tests.twins.kubernetes import TOKEN, make_certificate, serve_kubernetes

ACCESS = Path(__file__).resolve().parents[3] / "deploy/kubernetes/access.yaml"
JOB = "anneal-node-" + "2" * 26


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve_kubernetes(tmp_path_factory.mktemp("twin")) as twin:
        yield twin


@pytest.fixture
def twin(served):
    served.reset()
    return served


@pytest.fixture
def settings(twin):
    return KubernetesSettings(
        api_url=twin.url, namespace="ml", image="anneal/trainer:1", ca=twin.ca, queue="gpu",
        gpu_resource="nvidia.com/gpu", node_selector="gpu=h100,example.com/zone=a", service_account="pull",
    )  # fmt: skip


# --- the adapter ------------------------------------------------------------------------------------------------------


def test_a_node_is_requested_listed_and_released(twin, settings):
    engine = Kubernetes(settings, token=TOKEN)
    assert engine.request(NODE) == JOB
    job, [secret] = twin.rows["jobs"][JOB], twin.rows["secrets"].values()
    assert secret["metadata"]["ownerReferences"][0]["uid"] == f"uid-{JOB}"
    assert secret["stringData"] == {"token": ONCE}
    assert ONCE not in json.dumps(twin.rows["jobs"]) + repr(NODE)
    # Jobs that others made, without the pool's label or with the name of a node that is not theirs.
    twin.rows["jobs"]["other"] = job | {"metadata": {"name": "other", "labels": {}}}
    twin.rows["jobs"]["thief"] = job | {"metadata": job["metadata"] | {"name": "thief"}}

    job["spec"]["suspend"] = True
    [(name, listed)] = engine.list_nodes(prefix=PREFIX).items()
    assert (name, listed.external_id, listed.is_waiting, listed.reason) == (NODE.name, JOB, True, "Suspended")
    waits = {"type": "PodScheduled", "status": "False", "message": "no GPU"}
    pod = twin.start_pod(JOB, conditions=[waits])
    assert engine.list_nodes(prefix=PREFIX)[NODE.name].reason == "Pending: no GPU"
    pod["spec"]["nodeName"], pod["status"]["conditions"] = "n1", []
    pod["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]
    listed = engine.list_nodes(prefix=PREFIX)[NODE.name]
    assert (listed.is_waiting, listed.reason) == (False, "Pending: ImagePullBackOff")

    with pytest.raises(CapacityError, match="409"):
        engine.request(NODE)
    assert JOB in twin.rows["jobs"]  # the first one stays
    twin.faults = dict.fromkeys((("POST", "jobs"), ("DELETE", "jobs")), 403)
    with pytest.raises(CapacityError, match="403: fault Bearer … "):
        engine.request(NODE)
    assert not twin.deletions
    twin.faults = {}

    second = NodeRequest(**vars(NODE) | {"name": PREFIX + "node-" + "3" * 26})
    engine.request(second)
    assert engine.list_nodes(prefix=PREFIX).keys() == {NODE.name, second.name}  # from several pages
    job["status"], pod["status"]["phase"] = {"conditions": [{"type": "Failed", "status": "True"}]}, "Running"
    assert NODE.name in engine.list_nodes(prefix=PREFIX)  # it saves what it has
    pod["status"]["phase"] = "Failed"
    assert engine.list_nodes(prefix=PREFIX).keys() == {second.name}

    engine.release(external_ids=[JOB, "anneal-node-gone"])
    assert twin.rows["jobs"].keys() == {"other", "thief", "anneal-node-" + "3" * 26}
    assert JOB not in twin.rows["secrets"]
    assert [body["propagationPolicy"] for body in twin.deletions] == ["Foreground"]


@pytest.mark.slow
def test_faults_are_capacity_errors_without_a_token_and_leave_nothing(twin, settings, monkeypatch, tmp_path):
    monkeypatch.setattr(api_client, "_MAX_ANSWER_BYTES", 500_000)
    engine = Kubernetes(settings, token=TOKEN)
    said = {"slow": "0.7 seconds", "large": "too large"}
    for fault in ("slow", 302, 401, 403, 404, 409, 410, 422, 429, 500, 503, "large"):
        monkeypatch.setattr(api_client, "_SECONDS", 0.7 if fault == "slow" else 30.0)
        for method, kind in (("POST", "jobs"), ("POST", "secrets"), ("GET", "jobs"), ("GET", "pods")):
            twin.faults = {(method, kind): fault}
            with pytest.raises(CapacityError) as failed:
                engine.request(NODE) if method == "POST" else engine.list_nodes(prefix=PREFIX)
            assert said.get(fault, str(fault)) in str(failed.value)
            assert TOKEN not in str(failed.value)
            assert ONCE not in str(failed.value)
            assert not twin.rows["jobs"]
            assert not twin.rows["secrets"]
    for kind in ("jobs", "secrets"):
        twin.faults = {("POST", kind): "lost"}
        with pytest.raises(CapacityError, match="504"):
            engine.request(NODE)
        assert not twin.rows["jobs"]
        assert not twin.rows["secrets"]
    twin.faults = {}
    with pytest.raises(CapacityError, match="401"):
        Kubernetes(settings, token="other").list_nodes(prefix=PREFIX)
    foreign = msgspec.structs.replace(settings, ca=make_certificate(tmp_path / "key.pem"))
    twin.called.clear()
    with pytest.raises(CapacityError, match="cannot be reached"):
        Kubernetes(foreign, token=TOKEN).list_nodes(prefix=PREFIX)
    assert not twin.called


def test_a_failed_release_hinders_no_other_and_all_end_in_time(twin, settings, monkeypatch):
    engine = Kubernetes(settings, token=TOKEN)
    twin.faults = {("DELETE", "jobs"): 500}
    twin.faulted.clear()
    with pytest.raises(CapacityError, match="500"):
        engine.release(external_ids=["a", "b"])
    assert len(twin.faulted) == 2
    monkeypatch.setattr(kubernetes, "_RELEASE_SECONDS", -1)
    with pytest.raises(CapacityError, match="too slow"):
        engine.release(external_ids=["a", "b"])
    assert len(twin.faulted) == 2


def test_the_job_runs_once_without_rights(settings):
    job = job_manifest(settings, NODE)
    spec, labels = job["spec"], job["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "gpu"
    assert (spec["completionMode"], spec["backoffLimit"], spec["activeDeadlineSeconds"]) == ("Indexed", 0, 86_400)
    assert spec["ttlSecondsAfterFinished"] == 300
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert pod["automountServiceAccountToken"] is False
    assert (pod["nodeSelector"], pod["serviceAccountName"]) == ({"gpu": "h100", "example.com/zone": "a"}, "pull")
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    [container] = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    # What a worker reads of its surroundings.
    config = read_config({each["name"]: each.get("value", "10.0.0.1") for each in container["env"]})
    assert (config.internal_url, config.pool, config.node_address) == (NODE.internal_url, NODE.pool, "10.0.0.1")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(config.enroll_token_file) == f"{mounts['token']}/token"
    assert config.credential_file.is_relative_to(mounts["home"])
    # What the standard "restricted" of the namespace demands.
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["seccompProfile"]["type"]) == (
        True, "RuntimeDefault",
    )  # fmt: skip
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}} <= {"emptyDir", "secret"}

    plain = KubernetesSettings(api_url="https://a", namespace="ml", image="i", ca="PEM")
    pod = job_manifest(plain, NODE)["spec"]["template"]["spec"]
    assert not pod.keys() & {"nodeSelector", "serviceAccountName", "tolerations"}
    assert pod["containers"][0]["resources"]["limits"].keys() == {"cpu", "memory"}


def test_a_node_that_serves_listens_where_the_chart_lets_gateways_reach_it(settings):
    node = NodeRequest(**vars(NODE) | {"is_replica": True})
    [container] = job_manifest(settings, node)["spec"]["template"]["spec"]["containers"]
    assert (container["name"], container["command"]) == ("replica", ["python", "-m", "gpu_workers.serving.node"])
    environment = {each["name"]: each.get("value", "10.0.0.1") for each in container["env"]}
    assert read_config(environment).replica_port == 8003
    assert read_engine_config(environment).extra_arguments == ("--tensor-parallel-size", "2")


def test_spot_nodes_have_labels_of_their_own_and_tolerate_them_as_taints(settings):
    settings = msgspec.structs.replace(settings, spot_node_selector="gpu=h100,cloud.google.com/gke-spot=true")
    spot, plain = (
        job_manifest(settings, NodeRequest(**vars(NODE) | {"is_spot": is_spot}))["spec"]["template"]["spec"]
        for is_spot in (True, False)
    )
    assert spot["nodeSelector"] == {"gpu": "h100", "cloud.google.com/gke-spot": "true"}
    assert {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"} in (
        spot["tolerations"]
    )
    assert plain["nodeSelector"]["example.com/zone"] == "a" and len(plain["tolerations"]) == 1


# --- a pool -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(twin, floor):
    """Return a pool without workers whose nodes are Jobs."""
    Worker.objects.filter(pk=floor.worker.pk).update(revoked_at=db_now())
    settings = {"api_url": twin.url, "namespace": "ml", "image": "anneal/trainer:1", "ca": twin.ca}
    set_capacity(
        pool=floor.pool, kind="kubernetes", minimum=0, maximum=2, gpus_per_node=1, idle_seconds=60,
        node_nano_per_hour=0, budget_nano_per_hour=None, by="user_test", token=TOKEN,
        settings=settings | {"gpu_resource": "nvidia.com/gpu"},
    )  # fmt: skip
    return floor.pool


@pytest.mark.slow
def test_a_pool_goes_from_zero_to_a_job_and_back_with_the_rights_of_the_manifest(twin, pool, floor, caplog):
    caplog.set_level(logging.DEBUG)
    assert look(pool) == []
    job = floor.job()
    assert look(pool) == ["starting"]
    [name] = twin.rows["jobs"]
    once = twin.rows["secrets"][name]["stringData"]["token"]
    assert once not in json.dumps(twin.rows["jobs"])
    assert look(pool) == ["starting"]
    assert CapacityNode.objects.get().reason == "Waits for a pod"

    pod = twin.start_pod(name)
    pod["spec"]["nodeName"], pod["status"]["phase"] = "n1", "Running"
    request = EnrollRequest(token=once, kind="trainer", hostname=name, gpus=(), software={})
    worker = operations.enroll(request=request)[0]
    assert worker.pool == pool
    with pytest.raises(operations.InvalidWorkerCredential):
        operations.enroll(request=request)
    assert claims.claim(worker=worker, base_models=None) is not None
    assert look(pool, later=3000) == ["running"]

    Run.objects.filter(job=job).update(
        status="failed", finished_at=db_now(), lease_id=None, lease_token_sha256=None, lease_expires_at=None
    )
    assert look(pool, later=61) == ["draining"]
    assert look(pool) == ["released"]
    assert twin.rows == {"jobs": {}, "pods": {}, "secrets": {}}
    worker.refresh_from_db()
    assert worker.revoked_at
    assert (PoolCapacity.objects.get().problem, PoolCapacity.objects.get().failures) == ("", 0)
    assert TOKEN not in caplog.text
    assert once not in caplog.text

    [role] = [each for each in yaml.safe_load_all(ACCESS.read_text()) if each["kind"] == "Role"]
    allowed = {(verb, kind) for rule in role["rules"] for kind in rule["resources"] for verb in rule["verbs"]}
    assert allowed == twin.called


@pytest.mark.slow
def test_refusals_are_shown_and_a_later_look_starts_the_node(twin, pool, floor, caplog):
    floor.job()
    for failures, fault in enumerate((401, 403, 409, 410, 429, 500), 1):
        twin.faults = {("POST", "jobs"): fault}
        assert look(pool, later=4000) == ["requested"]
        capacity = PoolCapacity.objects.get()
        assert str(fault) in capacity.problem
        assert capacity.failures == failures
        assert TOKEN not in capacity.problem + caplog.text
    for fault in (401, 403, 410, 429, 500):
        twin.faults = {("GET", "jobs"): fault}
        assert look(pool, later=4000) == ["requested"]
        assert str(fault) in PoolCapacity.objects.get().problem
        assert PoolCapacity.objects.get().busy_until > db_now()  # other pools go first
    twin.faults = {("POST", "secrets"): "lost"}
    assert look(pool, later=4000) == ["requested"]
    assert not twin.rows["jobs"]
    twin.faults = {}
    assert look(pool, later=4000) == ["starting"]
    assert len(twin.rows["jobs"]) == 1
    assert TOKEN not in caplog.text


def test_a_pool_without_a_token_that_opens_calls_nothing_and_says_so(twin, pool):
    place = place_of(table="finetuning_capacitytoken", column="token_sealed", row_id="other")
    CapacityToken.objects.update(token_sealed=seal(TOKEN, place=place))
    look(pool)
    assert "cannot be opened" in PoolCapacity.objects.get().problem
    CapacityToken.objects.all().delete()
    look(pool)
    assert "missing" in PoolCapacity.objects.get().problem
    assert not twin.called
