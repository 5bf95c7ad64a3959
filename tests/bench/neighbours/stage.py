"""The platform as its own processes, with a tenant that works and others that take all they can get.

The web process, the gateway before a scripted engine, the worker API, and the workers that carry out short tasks,
validate files, work on batches, send mail, call webhooks and push to a hub; each as it is deployed.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scripts.embedded import ensure_running
from tests.bench.neighbours.mail_server import MailServer
from tests.services.environment import bench_environment
from tests.services.ports import free_port
from tests.services.programs import running_program, wait_until_up

_KEYS = 4  # of each tenant
_SETTINGS = {"ANNEAL_HUB_PUSHES": "1"}
_BAD_WORKER = "annw_bad-worker"
_JOBS = 3
_LARGE_BYTES = 20_000_000
_PROGRAMS = {
    "gateway": "gateway",
    "web": "app",
    "internal": "internal",
    "celery": "sys",
    "celery-data": "sys",
    "celery-data-middle": "sys",
    "celery-data-small": "sys",
    "celery-batches": "sys",
    "celery-mail": "sys",
    "celery-webhooks": "sys",
    "celery-hub-uploads": "sys",
}  # with their roles
_LANES = ("data", "data-middle", "data-small", "mail", "hub-uploads")  # of the outbox, with a program above
_SLOW_HUB_SECONDS = 2.0


@dataclass(frozen=True)
class Tenant:
    """A customer: its API keys, its browser's cookie, some things of its own, and the address it sends from."""

    keys: list[str]
    cookie: str
    organization_id: str
    file_id: str
    large_file_id: str
    job_id: str
    address: str


@dataclass(frozen=True)
class Platform:
    """`url` is the public origin: dashboard, API and, through it, the gateway. `model` answers at the gateway.

    `lease` is one that a trainer holds, `bad_worker` the credential of another machine, `floor` the TrainingSetup.
    """

    url: str
    internal_url: str
    home: Path
    mail_server: MailServer
    working: Tenant
    make_tenant: Callable[[], Tenant]
    lease: Any
    bad_worker: str
    floor: Any
    training_model: str
    model: str

    def has_queued_work(self) -> bool:
        """Return whether a worker that runs here has something left to do."""
        from apps.batches.lifecycle import ACTIVE
        from apps.batches.models import Batch
        from apps.core.models import OutboxMessage

        has_messages = OutboxMessage.objects.filter(sent_at=None, lane__in=_LANES).exists()
        return has_messages or Batch.objects.filter(status__in=ACTIVE).exists()

    def work_on_batches(self) -> None:
        """Do what the clock does every few seconds, which does not run here."""
        from apps.config.celery import app

        app.send_task("batches.work", expires=5)

    def forget_work(self, organization_id: str) -> None:
        """Have nothing done any more that the organization uploaded or ordered, and let it order as if it had not."""
        from django.db.models import F

        from apps.batches.lifecycle import BatchStatus
        from apps.batches.models import Batch
        from apps.batches.operations import cancel_batch
        from apps.core.database.clock import db_now
        from apps.core.errors import InvalidState
        from apps.core.models import OutboxMessage
        from apps.finetuning.models import HubPush

        OutboxMessage.objects.filter(share=organization_id, sent_at=None).delete()
        HubPush.objects.filter(organization=organization_id).delete()
        mine = Batch.objects.filter(organization=organization_id)
        for batch in mine.filter(status__in=(BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)):
            with suppress(InvalidState):  # it ends by itself
                cancel_batch(batch=batch, by="user_bench", now=db_now())
        mine.update(created_at=F("created_at") - timedelta(hours=2))
        self.work_on_batches()

    def forget_invitations(self) -> None:
        """Let everyone invite again as if nothing had been sent today."""
        from django.utils import timezone

        from apps.accounts.models import Invitation

        Invitation.objects.update(created_at=timezone.now() - timedelta(days=2), revoked_at=timezone.now())


@contextmanager
def running_platform(home: Path, *, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[Platform]:
    """Start everything in an empty folder, with `more` variables; it ends with the block. Raises NotStarted."""
    with ensure_running(home, durable=False) as services, ExitStack() as stack:
        os.environ.update(bench_environment(home, services, "owner") | _SETTINGS)
        port, internal_port, mail_server = free_port(), free_port(), MailServer(free_port())
        socket = home / "gateway.sock"
        made = _make_world(home, stack, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{internal_port}", mail_server)
        values = {
            "web_listen": f"--host 127.0.0.1 --port {port}",
            "internal_listen": f"--host 127.0.0.1 --port {internal_port}",
            "gateway_listen": f"--uds {socket}",
        }
        added = {"ANNEAL_GATEWAY_URL": f"unix://{socket}", "ANNEAL_EMAIL_URL": f"smtp://127.0.0.1:{mail_server.port}"}
        added |= _serve_hub(stack)
        for name, role in _PROGRAMS.items():
            environ = bench_environment(home, services, role) | _SETTINGS | added | dict(more)
            if name == "internal":
                environ["DJANGO_SETTINGS_MODULE"] = "apps.config.settings.internal"
            stack.enter_context(running_program(name, home, values, environ))
        for url in (f"{made.url}/accounts/login/", f"{made.internal_url}/internal/v1/claim"):
            wait_until_up(url, home)
        yield made


def _serve_hub(stack: ExitStack) -> dict[str, str]:
    """Serve a hub to which tenants push, slow for the namespace "hostile"; return the variables of its clients."""
    from tests.twins.http_server import Answer, Request, serve_http
    from tests.twins.hub import Hub

    hub = Hub()
    hub.commits.writers = {f"hf_{name}-token": {name} for name in ("working", "hostile")}

    def answer(request: Request) -> Answer:
        if "/hostile/" in request.path:
            time.sleep(_SLOW_HUB_SECONDS)
        return hub.answer(request)

    hub.url = stack.enter_context(serve_http(answer))
    hub.blob_url = stack.enter_context(serve_http(hub.answer_blob))
    return {"HF_ENDPOINT": hub.url, "HF_BLOB_HOSTS": hub.blob_url.removeprefix("http://")}


def _make_world(home: Path, stack: ExitStack, url: str, internal_url: str, mail_server: MailServer) -> Platform:
    """Migrate an empty database and fill it."""
    import django

    django.setup()
    from django.core.management import call_command

    from apps.core.database.clock import db_now
    from apps.finetuning.models import Worker
    from apps.finetuning.runs.claims import claim
    from apps.finetuning.runs.leases import Lease
    from tests.factories.accounts import make_organization, make_user
    from tests.factories.finetuning import TrainingSetup, make_worker
    from tests.factories.serving import make_served_model
    from tests.twins.scripted_engine import ScriptedEngine

    call_command("migrate", verbosity=0)
    call_command("collectstatic", interactive=False, verbosity=0)
    engine = stack.enter_context(ScriptedEngine(home / "engine.sock").running())
    make_served_model("bench", engine.url)
    owner = make_user("working")
    organization = make_organization("working", owner=owner)
    floor = TrainingSetup(organization)
    working = _make_tenant(organization, owner, floor, "127.0.0.2")
    lease = claim(worker=floor.worker, base_models=None)
    assert lease is not None
    make_worker(floor.pool, credential=_BAD_WORKER, base_model=floor.base_model, gpus=4)
    numbers = itertools.count(3)

    def make_tenant() -> Tenant:
        number = next(numbers)
        owner = make_user(f"hostile{number}")
        Worker.objects.update(last_seen_at=db_now() + timedelta(hours=1))  # it need not be heard of meanwhile
        return _make_tenant(make_organization(owner.name, owner=owner), owner, floor, f"127.0.0.{number}")

    return Platform(
        url, internal_url, home, mail_server, working, make_tenant,
        lease=Lease(id=lease.lease_id, token=lease.lease_token), bad_worker=_BAD_WORKER,
        floor=floor, training_model=floor.base_model.name, model="bench",
    )  # fmt: skip


def _make_tenant(organization: Any, owner: Any, floor: Any, address: str) -> Tenant:
    from django.conf import settings
    from django.test import Client

    from tests.factories.accounts import make_key
    from tests.factories.finetuning import make_job, make_training_file
    from tests.factories.serving import USD, give_credit

    give_credit(organization, 1_000 * USD)
    file_id = make_training_file(organization, floor.base_model).pk
    large_file_id = make_training_file(organization, floor.base_model, rows=_LARGE_BYTES // 100).pk
    jobs = [make_job(organization, floor.base_model) for _ in range(_JOBS)]
    client = Client()
    client.force_login(owner, backend=settings.AUTHENTICATION_BACKENDS[0])
    keys = [make_key(organization, owner).secret for _ in range(_KEYS)]
    cookie = f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}"
    return Tenant(keys, cookie, organization.pk, file_id, large_file_id, jobs[0].pk, address)
