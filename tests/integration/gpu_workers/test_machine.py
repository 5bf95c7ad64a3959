"""Enrolment, settings, preflight, the child's environment, and its end for want of memory."""

import os
import signal
import stat
from pathlib import Path

import msgspec
import pytest

from apps.contracts.failures import FailureCode
from apps.contracts.runs import BaseModelRef, CheckpointSaved
from gpu_workers.common.api_client import ApiClient
from gpu_workers.common.base_models import NotInstalled, locate_base_model
from gpu_workers.common.config import ConfigError, WorkerConfig, child_environment, read_config
from gpu_workers.common.enrolment import NotEnrolled, ensure_enrolled
from gpu_workers.common.preflight import NotReady, catalog_key, inspect_machine, require_ready
from gpu_workers.trainer.children import executor
from tests.support.agent import Draining, add_run, make_agent
from tests.twins.control_plane import serve_control_plane


def make_config(url: str, tmp_path: Path) -> WorkerConfig:
    token = tmp_path / "token"
    token.write_text("once\n")
    return WorkerConfig(
        internal_url=url,
        credential_file=tmp_path / "keys" / "credential.json",
        work_dir=tmp_path / "work",
        enroll_token_file=token,
    )


def test_a_token_is_redeemed_once_and_the_credential_kept_private(tmp_path):
    with serve_control_plane() as plane:
        config, api = make_config(plane.url, tmp_path), ApiClient(plane.url)

        first = ensure_enrolled(config, kind="trainer", api=api)
        again = ensure_enrolled(config, kind="trainer", api=api)
        api.close()

    assert first == again
    assert len(plane.enrollments) == 1
    assert plane.enrollments[0].gpus
    assert stat.S_IMODE(config.credential_file.stat().st_mode) == 0o600


def test_a_used_token_says_so(tmp_path):
    with serve_control_plane() as plane:
        config, api = make_config(plane.url, tmp_path), ApiClient(plane.url)
        config.enroll_token_file.write_text("used before")

        with pytest.raises(NotEnrolled, match="not accepted"):
            ensure_enrolled(config, kind="trainer", api=api)
        api.close()

    assert not config.credential_file.exists()


def test_a_missing_variable_is_named():
    with pytest.raises(ConfigError, match="ANNEAL_INTERNAL_URL"):
        read_config({"ANNEAL_WORK_DIR": "/nowhere"})


def test_the_childs_environment_holds_no_secret(monkeypatch):
    for name in ("ANNEAL_SIGNING_KEY", "CELERY_BROKER_URL", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "STRIPE_KEY"):
        monkeypatch.setenv(name, "platform-secret")

    environment = child_environment(threads=2)

    assert "platform-secret" not in environment.values()
    assert environment["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("has_network", [True, False])
def test_a_child_that_needs_no_network_learns_of_no_proxy(monkeypatch, has_network):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.setenv(name, "http://egress:3128")

    environment = child_environment(threads=1, has_network=has_network)

    assert ("http://egress:3128" in environment.values()) is has_network


def test_a_child_sees_the_gpus_of_its_job_only(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")

    assert child_environment(threads=1, devices=["5", "6"])["CUDA_VISIBLE_DEVICES"] == "5,6"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80"),
        ("NVIDIA H100 PCIe", "h100-pcie-80"),
        ("NVIDIA H200", "h200-sxm-141"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("NVIDIA L4", "l4-24"),
        ("NVIDIA L40", "l40-48"),
        ("NVIDIA L40S", "l40s-48"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4-16"),
        ("NVIDIA Z9000", "nvidia-z9000"),
    ],
)
def test_the_drivers_name_becomes_the_catalogs_key(name, key):
    assert catalog_key(name) == key


def test_a_machine_without_a_gpu_is_a_cpu(tmp_path):
    machine = inspect_machine(tmp_path, gpu_key="cpu")

    assert machine.gpu_key == "cpu"
    assert machine.memory_bytes > 0
    assert machine.software["python"]


def test_a_full_disk_takes_no_run(tmp_path):
    with pytest.raises(NotReady, match="disk"):
        require_ready(tmp_path, needed_disk_bytes=10**18)


def test_a_child_that_the_kernel_ends_while_the_machine_lacks_memory_ran_out_of_it(
    plane, models, tmp_path, monkeypatch
):
    counts = tmp_path / "memory.events"
    counts.write_text("max 9\noom 3\noom_kill 3\n")  # of children before
    monkeypatch.setattr(executor, "_CGROUP_EVENTS", counts)
    add_run(plane, models)
    draining = Draining(make_agent(plane, tmp_path, "hang"))
    plane.wait_for(lambda: plane.events_of(CheckpointSaved))
    [file] = (tmp_path / "work" / "runs").glob("*/child.json")

    counts.write_text("max 10\noom 4\noom_kill 4\n")
    os.kill(msgspec.json.decode(file.read_bytes())["pid"], signal.SIGKILL)
    draining.join()

    [outcome] = plane.outcomes
    assert (outcome.code, outcome.training_seconds) == (FailureCode.OUT_OF_MEMORY, 0.5)


@pytest.mark.parametrize("path", ["../outside", "/etc", "missing"])
def test_a_base_model_lies_inside_the_roots_or_nowhere(tmp_path, path):
    root = tmp_path / "models"
    for folder in (root / "tiny", tmp_path / "outside"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    found = locate_base_model(BaseModelRef(id="bm", name="tiny", path="tiny"), (root,))

    with pytest.raises(NotInstalled):
        locate_base_model(BaseModelRef(id="bm", name="x", path=path), (root,))

    assert found.path == str(root / "tiny")
