"""The processes of the comparison: the engines, our gateway with its services, and each rival before an engine."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.embedded import ensure_running
from scripts.processes import PROGRAMS
from tests.bench.gateway import installing
from tests.services.environment import bench_environment
from tests.services.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
PATH = "/v1/chat/completions"
MODEL = "bench"
TOKENS = 8
RIVAL_KEY = "sk-bench-master-key"
_BARE = dict(os.environ)  # before ours is set up: a rival that finds our database would use it
_REPLICAS = {"ANNEAL_REPLICA_PLACES": "2048", "ANNEAL_REPLICA_ADDRESSES": "127.0.0.1"}
_START_SECONDS = 300  # LiteLLM takes long on a busy machine


class NotStarted(Exception):
    """A process of the comparison did not come up; its log's end is in the message."""


@dataclass(frozen=True)
class Target:
    """One server under test, and what it wants to be sent."""

    name: str
    port: int
    pid: int
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rss_mib(self) -> float:
        """Return the memory of the process and its children."""
        return round(sum(_rss_bytes(pid) for pid in _family(self.pid)) / 2**20, 1)


@dataclass(frozen=True)
class Engines:
    whole_port: int
    streamed_port: int
    slow_port: int


# --- The answer -------------------------------------------------------------------------------------------------------


def _usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": 20, "completion_tokens": count, "total_tokens": 20 + count}


def whole_answer() -> str:
    message = {"role": "assistant", "content": " word" * TOKENS}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    body = {"id": "chatcmpl-engine", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
    return json.dumps(body | {"usage": _usage(TOKENS)})


def event(choices: list[dict[str, Any]], count: int) -> str:
    body = {"id": "chatcmpl-engine", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return "data: " + json.dumps(body | {"choices": choices, "usage": _usage(count)}) + "\n\n"


def token_event(content: str, count: int, *, finish: str | None = None) -> str:
    return event([{"index": 0, "delta": {"content": content}, "finish_reason": finish}], count)


def streamed_answer() -> str:
    first = event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], 0)
    tokens = [token_event(" word", count) for count in range(1, TOKENS + 1)]
    return "".join([first, *tokens, token_event("", TOKENS, finish="stop"), event([], TOKENS), "data: [DONE]\n\n"])


# --- Processes --------------------------------------------------------------------------------------------------------


@contextmanager
def process(name: str, command: list[str], port: int, home: Path, environ: dict[str, str]) -> Iterator[int]:
    """Run a server until the block ends. Raises NotStarted."""
    log = home / f"{name}.log"
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, cwd=ROOT, env=_BARE | environ, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(port):
            if started.poll() is not None or time.monotonic() > deadline:
                raise NotStarted(f"{name} did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
        yield started.pid
    finally:
        started.terminate()
        try:
            started.wait(timeout=20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [one for child in task.read_text().split() for one in _family(int(child))]
    return found


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _configured(name: str, folder: Path, **values: object) -> Path:
    text = (installing.CONFIGURATION / name).read_text()
    for key, value in (values | {"folder": folder}).items():
        text = text.replace(f"@{key}@", str(value))
    path = folder / name
    path.write_text(text)
    return path


# --- The engines ------------------------------------------------------------------------------------------------------


@contextmanager
def running_engines(home: Path) -> Iterator[Engines]:
    engines = Engines(free_port(), free_port(), free_port())
    configuration = _configured(
        "upstream.conf", home,
        whole_port=engines.whole_port, streamed_port=engines.streamed_port,
        whole=whole_answer(), streamed=streamed_answer().replace("\n", "\\n"),
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(process("upstream", nginx(configuration, home), engines.whole_port, home, _libraries()))
        slow = [sys.executable, "-m", "tests.bench.gateway.slow_engine", str(engines.slow_port)]
        stack.enter_context(process("slow-engine", slow, engines.slow_port, home, {}))
        yield engines


def nginx(configuration: Path, home: Path) -> list[str]:
    return [str(installing.debian_root() / "usr/sbin/nginx"), "-p", str(home), "-c", str(configuration)]


def _libraries() -> dict[str, str]:
    return installing.libraries()


# --- Our gateway ------------------------------------------------------------------------------------------------------


@contextmanager
def running_gateway(home: Path, engines: Engines) -> Iterator[tuple[Target, Target]]:
    """Give the gateway twice: before the static engine and before the slow one."""
    with ensure_running(home, durable=False) as services:
        owner = bench_environment(home, services, "owner") | _REPLICAS
        os.environ.update(owner)
        key = _make_world(engines)
        program = next(program for program in PROGRAMS if program.name == "gateway")
        port = free_port()
        words = program.command.replace("${gateway_listen}", f"--host 127.0.0.1 --port {port}").split()
        command = [str(installing.interpreter()), "-m", *words]
        environ = installing.packages(Path(sys.prefix)) | bench_environment(home, services, "gateway") | _REPLICAS
        with process("gateway", command, port, home, environ) as pid:
            headers = {"Authorization": f"Bearer {key}"}
            yield Target("gateway", port, pid, headers), Target("gateway", port, pid, headers | {"x-model": "slow"})


def _make_world(engines: Engines) -> str:
    """Migrate an empty database and fill it; return a customer's key."""
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import transaction

    from apps.core.database.clock import db_now
    from apps.finetuning.usage.quotas import set_quota
    from tests.factories.accounts import make_key, make_organization, make_user
    from tests.factories.serving import USD, give_credit, make_served_model

    call_command("migrate", verbosity=0)
    make_served_model(MODEL, f"http://127.0.0.1:{engines.streamed_port}")
    make_served_model("slow", f"http://127.0.0.1:{engines.slow_port}")
    owner = make_user("bench")
    organization = make_organization("Bench", owner=owner)
    give_credit(organization, 100_000 * USD)
    with transaction.atomic():
        limits = {"requests_per_minute": 2_000_000_000, "tokens_per_minute": 2_000_000_000, "concurrent_requests": None}
        set_quota(organization=organization, by="system", now=db_now(), **limits)
    return make_key(organization, owner).secret


def settle() -> None:
    """Have the database and the disk end what a load left to them.

    Without it autovacuum handles the load's rows within the next minute and delays what is measured then: of eight
    rounds at 200 requests a second two had a p99 of 37 and 137 ms. With it all had 5.5 to 7.5 ms.
    """
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("VACUUM (ANALYZE) billing_usageevent")
    os.sync()


def count_recorded() -> int:
    from apps.billing.models import UsageEvent

    return UsageEvent.objects.count()


# --- The rivals -------------------------------------------------------------------------------------------------------


@contextmanager
def running_rivals(home: Path, engine_port: int) -> Iterator[dict[str, Target]]:
    """Start every rival before the engine at `engine_port`. Raises NotStarted when one does not."""
    engine = f"http://127.0.0.1:{engine_port}"
    ports = {name: free_port() for name in ("litellm", "portkey", "sglang_router", "nginx")}
    litellm = _configured("litellm.yaml", home, engine_port=engine_port, key=RIVAL_KEY)
    proxy = _configured("nginx.conf", home, engine_port=engine_port, port=ports["nginx"])
    authorized = {"Authorization": f"Bearer {RIVAL_KEY}"}
    named = {
        "litellm": ([str(installing.interpreter()), str(installing.FOLDER / "litellm/bin/litellm"),
                     "--config", str(litellm), "--host", "127.0.0.1", "--port", str(ports["litellm"]),
                     "--num_workers", "1", "--log_config", str(installing.CONFIGURATION / "litellm-logging.json")],
                    installing.packages(installing.FOLDER / "litellm") | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
                    authorized),
        "portkey": (["node", str(installing.FOLDER / "portkey/node_modules/@portkey-ai/gateway/build/start-server.js"),
                     f"--port={ports['portkey']}", "--headless"], {"TRUSTED_CUSTOM_HOSTS": "127.0.0.1"},
                    authorized | {"x-portkey-provider": "openai", "x-portkey-custom-host": f"{engine}/v1"}),
        "sglang_router": ([str(installing.python_of("sglang-router")), "-m", "sglang_router.launch_router",
                           "--host", "127.0.0.1", "--port", str(ports["sglang_router"]), "--worker-urls", engine,
                           "--policy", "round_robin", "--log-level", "warn", "--prometheus-port", str(free_port())],
                          {}, {}),
        "nginx": (nginx(proxy, home), _libraries(), {}),
    }  # fmt: skip
    with ExitStack() as stack:
        targets = {}
        for name, (command, environ, headers) in named.items():
            pid = stack.enter_context(process(name, command, ports[name], home, environ))
            targets[name] = Target(name, ports[name], pid, headers)
        yield targets
