"""The platform as its own processes, with two tenants: one that works, and one that takes all it can get.

The web process, the gateway before a scripted engine, and the worker that validates files; each as it is deployed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from apps.core.embedded import ensure_running
from scripts.processes import PROGRAMS
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
_KEYS = 4  # of each tenant
_JOBS = 10
_START_SECONDS = 120


class NotStarted(Exception):
    """A process did not come up; its log's end is in the message."""


@dataclass(frozen=True)
class Tenant:
    """A customer: its API keys, its browser's cookies, and where it sends from."""

    keys: list[str]
    cookie: str
    organization_id: str
    file_id: str
    job_id: str
    address: str


@dataclass(frozen=True)
class Platform:
    """`url` is the public origin: dashboard, API and, through it, the gateway. `model` answers at the gateway."""

    url: str
    home: Path
    working: Tenant
    hostile: Tenant
    training_model: str
    model: str


@contextmanager
def running_platform(home: Path) -> Iterator[Platform]:
    """Start everything in an empty folder; it ends with the block. Raises NotStarted."""
    with ensure_running(home, durable=False) as services, ExitStack() as stack:
        os.environ.update(_environ(home, services, "owner"))
        port = free_port()
        socket = home / "gateway.sock"
        made = _make_world(home, stack, f"http://127.0.0.1:{port}")
        values = {
            "web_listen": f"--host 127.0.0.1 --port {port}",
            "gateway_listen": f"--uds {socket}",
        }
        for name, role in (("gateway", "gateway"), ("web", "app"), ("celery-data", "sys")):
            environ = _environ(home, services, role) | {"ANNEAL_GATEWAY_URL": f"unix://{socket}"}
            stack.enter_context(_process(name, home, values, environ))
        _wait_until_up(f"{made.url}/accounts/login/", home)
        yield made


def _environ(home: Path, services: Any, role: str) -> dict[str, str]:
    return {
        "ANNEAL_HOME": str(home),
        "ANNEAL_SECRET_KEY": "bench-secret-key-that-is-long-enough-for-django",
        "ANNEAL_KEY_PEPPER": "bench-pepper",
        "ANNEAL_SIGNING_KEY": "bench-signing-key",
        "DATABASE_URL": services.database_url(role),
        "REDIS_URL": services.redis_url,
        "CELERY_BROKER_URL": services.broker_url,
        "DJANGO_SETTINGS_MODULE": "apps.config.settings.dev",
    }


def _make_world(home: Path, stack: ExitStack, url: str) -> Platform:
    """Migrate an empty database and fill it."""
    import django

    django.setup()
    from django.core.management import call_command

    from tests.factories.accounts import make_organization, make_user
    from tests.factories.finetuning import Floor
    from tests.factories.serving import make_served_model
    from tests.twins.scripted_engine import ScriptedEngine

    call_command("migrate", verbosity=0)
    call_command("collectstatic", interactive=False, verbosity=0)
    engine = stack.enter_context(ScriptedEngine(home / "engine.sock").running())
    make_served_model("bench", engine.url)
    owners = make_user("working"), make_user("hostile")
    organizations = [make_organization(owner.name, owner=owner) for owner in owners]
    floor = Floor(organizations[0])
    tenants = [
        _make_tenant(organization, owner, floor, f"127.0.0.{number}")
        for number, (organization, owner) in enumerate(zip(organizations, owners, strict=True), start=2)
    ]
    return Platform(url, home, *tenants, training_model=floor.base_model.name, model="bench")


def _make_tenant(organization: Any, owner: Any, floor: Any, address: str) -> Tenant:
    from django.conf import settings
    from django.test import Client

    from tests.factories.accounts import make_key
    from tests.factories.finetuning import make_job, make_training_file
    from tests.factories.serving import USD, give_credit

    give_credit(organization, 1_000 * USD)
    file_id = make_training_file(organization, floor.base_model).pk
    jobs = [make_job(organization, floor.base_model) for _ in range(_JOBS)]
    client = Client()
    client.force_login(owner, backend=settings.AUTHENTICATION_BACKENDS[0])
    keys = [make_key(organization, owner).secret for _ in range(_KEYS)]
    cookie = f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}"
    return Tenant(keys, cookie, organization.pk, file_id, jobs[0].pk, address)


@contextmanager
def _process(name: str, home: Path, values: dict[str, str], environ: dict[str, str]) -> Iterator[None]:
    program = next(program for program in PROGRAMS if program.name == name)
    words = program.command
    for key, value in values.items():
        words = words.replace(f"${{{key}}}", value)
    with (home / f"{name}.log").open("wb") as log:
        started = subprocess.Popen(
            [sys.executable, "-m", *words.split()], cwd=ROOT, env=os.environ | environ, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        started.terminate()
        try:
            started.wait(timeout=20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def _wait_until_up(url: str, home: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise NotStarted((home / "web.log").read_text(errors="replace")[-3000:])
