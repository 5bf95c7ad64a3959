"""dstack against a stateful twin of its API, and against a real server if one is configured.

For the real one set ANNEAL_TEST_DSTACK_URL, ANNEAL_TEST_DSTACK_TOKEN and perhaps ANNEAL_TEST_DSTACK_PROJECT (`main`).
Its project needs no backend: the runs then wait for capacity.
"""

import os
import subprocess
import time

import msgspec
import pytest

from apps.contracts.worker_api import EnrollRequest
from apps.core.database.clock import db_now
from apps.finetuning.models import CapacityNode, PoolCapacity, Run, Worker
from apps.finetuning.pools import operations
from apps.finetuning.pools.capacity import api_client, dstack
from apps.finetuning.pools.capacity.dstack import Dstack, DstackSettings
from apps.finetuning.pools.capacity.port import CapacityError, NodeRequest
from apps.finetuning.pools.capacity.settings import set_capacity
from apps.finetuning.runs import claims
from gpu_workers.common.config import read_config, read_engine_config
from tests.twins.capacity import NODE, ONCE, PREFIX, look
from tests.twins.dstack import TOKEN, serve_dstack

RUN = "anneal-node-" + "2" * 26
URL = os.environ.get("ANNEAL_TEST_DSTACK_URL", "")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve_dstack(tmp_path_factory.mktemp("twin")) as twin:
        yield twin


@pytest.fixture
def twin(served):
    served.reset()
    return served


@pytest.fixture
def settings(twin):
    return DstackSettings(api_url=twin.url, project="anneal", image="anneal/gpu:1", ca=twin.ca, gpu="H100:80GB")


# --- on the twin and on a real server ---------------------------------------------------------------------------------


def goes_from_request_to_release(settings, token, *, end):
    """Assert what Anneal relies on. `end` lets a stopped run end."""
    engine = Dstack(settings, token=token)
    assert engine.request(NODE) == RUN
    listed = engine.list_nodes(prefix=PREFIX)
    assert listed.keys() == {NODE.name}
    assert (listed[NODE.name].external_id, listed[NODE.name].is_waiting) == (RUN, True)
    assert listed[NODE.name].reason in ("Submitted", "Pending", "Retrying")
    assert engine.list_nodes(prefix="anneal-pool-" + "9" * 26 + "-") == {}
    with pytest.raises(CapacityError, match=r"400: .*Resource has been changed"):
        engine.request(NODE)
    engine.release(external_ids=[RUN, "anneal-node-gone"])
    end()
    for _ in range(60):
        if not engine.list_nodes(prefix=PREFIX):
            break
        time.sleep(1)
    assert engine.list_nodes(prefix=PREFIX) == {}
    engine.release(external_ids=[RUN])  # it has ended
    with pytest.raises(CapacityError, match="403: Invalid token"):
        Dstack(settings, token="other").list_nodes(prefix=PREFIX)
    other = msgspec.structs.replace(settings, project="nope")
    with pytest.raises(CapacityError, match="404: Not found"):
        Dstack(other, token=token).request(NODE)
    assert Dstack(other, token=token).list_nodes(prefix=PREFIX) == {}


def test_a_node_is_requested_listed_and_released(twin, settings):
    goes_from_request_to_release(settings, TOKEN, end=lambda: twin.move(RUN, "terminated"))


@pytest.mark.nightly
@pytest.mark.skipif(not URL, reason="no dstack server is configured")
def test_a_real_server_does_the_same():
    settings = DstackSettings(
        api_url=URL, project=os.environ.get("ANNEAL_TEST_DSTACK_PROJECT", "main"), image="anneal/gpu:1", gpu="H100:80GB"
    )
    goes_from_request_to_release(settings, os.environ["ANNEAL_TEST_DSTACK_TOKEN"], end=lambda: None)


# --- on the twin ------------------------------------------------------------------------------------------------------


def test_the_states_of_a_run_and_runs_of_others(twin, settings, monkeypatch):
    engine = Dstack(msgspec.structs.replace(settings, fleet="none"), token=TOKEN)
    engine.request(NODE)
    listed = engine.list_nodes(prefix=PREFIX)[NODE.name]
    assert (listed.is_waiting, listed.reason) == (True, "Retrying")
    for status, message, reason in (
        ("provisioning", "", "Provisioning"), ("provisioning", "pulling", "Pulling"), ("running", "", ""),
        ("terminating", "", "Terminating"),
    ):  # fmt: skip
        twin.move(RUN, status, message)
        listed = engine.list_nodes(prefix=PREFIX)[NODE.name]
        assert (listed.is_waiting, listed.reason) == (False, reason)
    # Runs with no tags, and one with the tag of a node that is not its own.
    row = twin.rows[RUN]
    twin.rows["other"] = row | {"id": "a", "run_spec": {"run_name": "other", "configuration": {"type": "task"}}}
    twin.rows["thief"] = row | {"id": "b", "run_spec": row["run_spec"] | {"run_name": "thief"}}
    monkeypatch.setattr(dstack, "_PAGE", 1)
    assert engine.list_nodes(prefix=PREFIX).keys() == {NODE.name}  # from several pages
    monkeypatch.setattr(dstack, "_MAX_PAGES", 2)
    with pytest.raises(CapacityError, match="too many"):
        engine.list_nodes(prefix=PREFIX)
    monkeypatch.undo()
    for status in ("failed", "done"):
        twin.move(RUN, status)
        assert engine.list_nodes(prefix=PREFIX) == {}


@pytest.mark.slow
def test_faults_are_capacity_errors_without_a_token_and_leave_nothing(twin, settings, monkeypatch):
    engine = Dstack(settings, token=TOKEN)
    said = {"slow": "0.7 seconds", "lost": "cannot be reached"}
    for fault in ("slow", 302, 401, 403, 404, 409, 422, 429, 500, 503):
        monkeypatch.setattr(api_client, "_SECONDS", 0.7 if fault == "slow" else 30.0)
        for verb in ("apply", "list", "stop"):
            twin.faults = {verb: fault}
            with pytest.raises(CapacityError) as failed:
                if verb == "apply":
                    engine.request(NODE)
                elif verb == "list":
                    engine.list_nodes(prefix=PREFIX)
                else:
                    engine.release(external_ids=[RUN])
            assert said.get(fault, str(fault)) in str(failed.value)
            assert TOKEN not in str(failed.value)
            assert ONCE not in str(failed.value)
            assert not twin.rows
    twin.faults = {"apply": "lost"}
    with pytest.raises(CapacityError, match="cannot be reached"):
        engine.request(NODE)
    assert twin.rows[RUN]["status"] == "terminating"
    foreign = msgspec.structs.replace(settings, ca=None)
    twin.calls = 0
    with pytest.raises(CapacityError, match="cannot be reached"):
        Dstack(foreign, token=TOKEN).list_nodes(prefix=PREFIX)
    assert not twin.calls


def test_the_run_is_not_repeated_and_its_worker_reads_what_it_needs(twin, settings, tmp_path):
    Dstack(msgspec.structs.replace(settings, fleet="h100", spot_policy="spot"), token=TOKEN).request(NODE)
    task = twin.rows[RUN]["run_spec"]["configuration"]
    assert task["resources"]["gpu"] == {"name": ["H100"], "count": 2, "memory": "80GB"}
    assert (task["spot_policy"], task["fleets"], task["user"]) == ("spot", ["h100"], "10001")
    assert task["retry"]["on_events"] == ["no-capacity"]
    assert task["stop_duration"] >= 120
    # The command as dstack joins it, with a stand-in for Python that shows what it gets.
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\nenv\n')
    (tmp_path / "python").chmod(0o755)
    env = task["env"] | {"ANNEAL_ENROLL_TOKEN_FILE": str(tmp_path / "token"), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    shown = subprocess.run(
        [*task["entrypoint"].split(), *task["commands"]], env=env, capture_output=True, text=True, check=True
    ).stdout
    arguments, *variables = shown.splitlines()
    assert arguments == "-m gpu_workers.trainer.polling --exit-when-idle 60"
    assert ONCE not in shown
    config = read_config(dict(each.split("=", 1) for each in variables))
    assert (config.internal_url, config.pool) == (NODE.internal_url, NODE.pool)
    assert config.enroll_token_file.read_text() == ONCE
    assert config.enroll_token_file.stat().st_mode & 0o777 == 0o600

    Dstack(settings, token=TOKEN).request(
        NodeRequest(**vars(NODE) | {"name": PREFIX + "node-" + "4" * 26, "is_replica": True})
    )
    serving = twin.rows["anneal-node-" + "4" * 26]["run_spec"]["configuration"]
    assert serving["commands"][0].endswith("exec python -m gpu_workers.serving.node")
    assert read_engine_config(serving["env"]).extra_arguments == ("--tensor-parallel-size", "2")

    Dstack(msgspec.structs.replace(settings, gpu=None), token=TOKEN).request(
        NodeRequest(**vars(NODE) | {"name": PREFIX + "node-" + "3" * 26})
    )
    plain = twin.rows["anneal-node-" + "3" * 26]["run_spec"]["configuration"]
    assert (plain["resources"]["gpu"]["count"], plain["spot_policy"], plain["fleets"]) == (0, "on-demand", None)


def test_in_a_pool_of_both_kinds_each_node_has_its_own(twin, settings):
    twin_of = Dstack(msgspec.structs.replace(settings, spot_policy="auto"), token=TOKEN)
    for digit, is_spot, policy in (("4", True, "spot"), ("5", False, "on-demand"), ("6", None, "auto")):
        run = "node-" + digit * 26
        twin_of.request(NodeRequest(**vars(NODE) | {"name": PREFIX + run, "is_spot": is_spot}))
        assert twin.rows[f"anneal-{run}"]["run_spec"]["configuration"]["spot_policy"] == policy


# --- a pool -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(twin, floor):
    """Return a pool without workers whose nodes are runs of dstack."""
    Worker.objects.filter(pk=floor.worker.pk).update(revoked_at=db_now())
    set_capacity(
        pool=floor.pool, kind="dstack", minimum=0, maximum=2, gpus_per_node=1, idle_seconds=60,
        node_nano_per_hour=0, budget_nano_per_hour=None, by="user_test", token=TOKEN,
        settings={"api_url": twin.url, "project": "anneal", "image": "anneal/gpu:1", "ca": twin.ca, "gpu": "H100"},
    )  # fmt: skip
    return floor.pool


@pytest.mark.slow
def test_a_pool_goes_from_zero_to_a_job_and_back(twin, pool, floor, caplog):
    assert look(pool) == []
    job = floor.job()
    assert look(pool) == ["starting"]
    assert look(pool, later=4000) == ["starting"]  # it waits for a machine as long as dstack does
    [name] = twin.rows
    assert CapacityNode.objects.get().reason == "Submitted"
    twin.move(name, "running")
    once = twin.rows[name]["run_spec"]["configuration"]["env"]["ANNEAL_NODE_TOKEN"]
    request = EnrollRequest(token=once, kind="trainer", hostname=name, gpus=(), software={})
    worker = operations.enroll(request=request)[0]
    assert worker.pool == pool
    assert claims.claim(worker=worker, base_models=None) is not None
    assert look(pool) == ["running"]

    Run.objects.filter(job=job).update(
        status="failed", finished_at=db_now(), lease_id=None, lease_token_sha256=None, lease_expires_at=None
    )
    assert look(pool, later=61) == ["draining"]
    assert twin.rows[name]["status"] == "terminating"
    twin.move(name, "terminated")
    assert look(pool) == ["released"]
    assert (PoolCapacity.objects.get().problem, PoolCapacity.objects.get().failures) == ("", 0)
    assert TOKEN not in caplog.text
    assert once not in caplog.text


@pytest.mark.slow
def test_refusals_and_failed_runs_are_shown_and_a_later_look_starts_the_node(twin, pool, floor, caplog):
    floor.job()
    for failures, fault in enumerate((401, 429, 500), 1):
        twin.faults = {"apply": fault}
        assert look(pool, later=4000) == ["requested"]
        capacity = PoolCapacity.objects.get()
        assert str(fault) in capacity.problem
        assert capacity.failures == failures
    twin.faults = {}
    assert look(pool, later=4000) == ["starting"]
    [name] = twin.rows
    twin.move(name, "failed")  # dstack gave up: its machine did not come
    assert look(pool)[0] == "lost"
    assert PoolCapacity.objects.get().failures == 4
    assert look(pool, later=4000)[-1] == "starting"
    assert TOKEN not in caplog.text
