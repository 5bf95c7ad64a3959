"""The platform's serving half as its own processes: services, worker API, gateway, agent and real vLLM on CPUs."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_workers.engine.state import EnginePaths
from scripts.embedded import ensure_running
from scripts.environment import Prepared, plain_environment, prepare
from scripts.processes import REPOSITORY, Program

_PROGRAMS = ("internal", "gateway", "vllm", "serving-agent")
_START_SECONDS = 900
_CAPABILITIES = {
    "ANNEAL_ENGINE_MAX_LORA_RANK": "8",
    "ANNEAL_REPLICA_PLACES": "256",
}


class NotStarted(Exception):
    """A process did not come up, or did not stay; its log's end is in the message."""


@dataclass(frozen=True)
class Stage:
    """Where to ask: the gateway's and the engine's sockets, a customer's key, and the models by both their names."""

    gateway: Path
    engine: Path
    key: str
    base: tuple[str, str]  # as the gateway calls it, as the engine does
    warm: list[tuple[str, str]]
    cold: list[tuple[str, str]]


@contextmanager
def running_stage(home: Path, *, warm: int, cold: int) -> Iterator[Stage]:
    """Serve `warm` adapters of the demo model and know of `cold` ones; everything ends with the block."""
    os.environ.update(_CAPABILITIES)
    os.environ |= {
        "ANNEAL_HOME": str(home),
        "ANNEAL_ENGINE_MAX_LORAS": str(warm),
        "ANNEAL_ENGINE_MAX_CPU_LORAS": str(2 * warm),
        "ANNEAL_REPLICA_CAPACITY": str(warm),
    }
    prepared = prepare(home, is_debug=True, is_launch=True)
    with ensure_running(home), ExitStack() as stack:
        key, base, versions = _make_world(prepared, home, warm=warm, cold=cold)
        started = {name: stack.enter_context(_program(prepared, name, home)) for name in _PROGRAMS}
        engine = EnginePaths(Path(_variables(prepared, "vllm")["ANNEAL_WORK_DIR"])).socket
        gateway = Path(prepared.known["ANNEAL_GATEWAY_URL"].removeprefix("unix://"))
        named = [(version.model_name, version.lora_name) for version in versions]
        made = Stage(gateway, engine, key, (base.name, base.served_name), named[:warm], named[warm:])
        _wait_until_warm(made, versions[:warm], started, home)
        yield made


def _find(prepared: Prepared, name: str) -> Program:
    return next(program for program in prepared.programs if program.name == name)


def _variables(prepared: Prepared, name: str) -> dict[str, str]:
    return prepared.variables(_find(prepared, name))


@contextmanager
def _program(prepared: Prepared, name: str, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    program = _find(prepared, name)
    environment = plain_environment() | {"ANNEAL_HOME": str(home)} | _variables(prepared, name)
    with open(home / f"{name}.log", "wb") as log:
        started = subprocess.Popen(
            prepared.place.command(program), cwd=REPOSITORY, env=environment, stdout=log, stderr=log
        )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(timeout=program.stop_seconds)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def _make_world(prepared: Prepared, home: Path, *, warm: int, cold: int) -> tuple[str, Any, list[Any]]:
    """Fill an empty database as the demonstration does; return a customer's key, the base model and the versions."""
    os.environ.update(prepared.management_variables(role="owner"))
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import transaction

    from apps.accounts.models import Organization
    from apps.catalog.models import BaseModel
    from apps.core.database.clock import db_now
    from apps.finetuning.usage.quotas import set_quota
    from apps.serving.models import Deployment

    call_command("prepare", demo=True, verbosity=0)
    account = json.loads((home / "demo.json").read_text())
    base = BaseModel.objects.get(name=account["base_model"])
    organization = Organization.objects.get(pk=account["organization_id"])
    with transaction.atomic():
        limits = {"requests_per_minute": 2_000_000_000, "tokens_per_minute": 2_000_000_000, "concurrent_requests": None}
        set_quota(organization=organization, by="system", now=db_now(), **limits)
    folder = home / "made"
    python = REPOSITORY / ".venv-engines/bin/python"
    command = [str(python), "-m", "tests.bench.serving.adapters", str(folder), str(warm + cold)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    versions = [_publish(organization, base, folder / str(number)) for number in range(warm + cold)]
    # These got no request for a day, so they have no slot.
    Deployment.objects.filter(adapter_version__in=versions[warm:]).update(created_at="2000-01-01T00:00Z")
    return account["api_key"], base, versions


def _publish(organization: Any, base: Any, folder: Path) -> Any:
    from apps.core.objects.store import object_key, store
    from apps.serving.models import Deployment
    from tests.factories.serving import make_version

    prefix, files = object_key(organization.pk, "adapters", f"bench-{folder.name}"), []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        store().put_stream(f"{prefix}/{path.name}", [content])
        files.append({"name": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    version = make_version(organization, base, object_prefix=prefix, manifest={"files": files})
    Deployment.objects.create(organization=organization, adapter_version=version)
    return version


def _wait_until_warm(made: Stage, versions: list[Any], started: dict[str, subprocess.Popen[bytes]], home: Path) -> None:
    """Place them as the beat's task does until the replica says that it holds them all. Raises NotStarted."""
    from apps.core.database.clock import db_now
    from apps.serving.models import LoadedAdapter, Replica
    from apps.serving.placements import replan_all

    deadline = time.monotonic() + _START_SECONDS
    while LoadedAdapter.objects.filter(adapter_version__in=versions, state="loaded").count() < len(versions):
        for name, process in started.items():
            if process.poll() is not None or time.monotonic() > deadline:
                raise NotStarted(f"{name}:\n{(home / f'{name}.log').read_text(errors='replace')[-3000:]}")
        Replica.objects.update(capacity=len(versions), slots=len(versions))  # accepted, as an operator would
        replan_all(now=db_now())
        time.sleep(1.0)
    sys.stdout.write(f"{len(versions)} adapters are loaded\n")


def replica_facts() -> dict[str, Any]:
    """Return the conditions of the measurement: what the replica said of itself."""
    from apps.serving.models import Replica

    replica = Replica.objects.get()
    return {
        "slots": replica.room.slots,
        "places": replica.room.capacity,
        "max_rank": replica.room.max_rank,
        "memory_bytes": replica.load.get("memory_bytes", 0),
        "engine_restarts": replica.load.get("restarts", 0),
    }
