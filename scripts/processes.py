"""The one table of Anneal's programs: their commands, their variables, and the order in which they stop.

`make demo` renders it as a supervisor configuration; deploy/compose.yaml repeats the commands and a test compares them.
"""

import shlex
import string
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

# The variables that a program may receive. A trainer and an engine get no secret of the control plane and no database.
CONTROL = frozenset({
    "ANNEAL_SECRET_KEY", "ANNEAL_KEY_PEPPER", "ANNEAL_SIGNING_KEY", "DATABASE_URL", "REDIS_URL", "CELERY_BROKER_URL",
    "ANNEAL_PUBLIC_URL", "ANNEAL_INTERNAL_URL", "ANNEAL_GATEWAY_URL", "ANNEAL_OBJECT_STORE",
    "ANNEAL_BASE_MODEL_ROOTS", "ANNEAL_DEBUG", "DJANGO_SETTINGS_MODULE",
})  # fmt: skip
# The bucket's own keys: only for programs that sign URLs, read files or delete them.
STORE_OPTIONS = frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"})
CONTROL_OPTIONS = frozenset({
    "ANNEAL_SECRET_KEY_FALLBACKS", "ANNEAL_ALLOWED_HOSTS", "ANNEAL_API_ORIGINS", "ANNEAL_WELCOME_CREDIT_USD",
    "ANNEAL_MOST_UNPAID_ORGANIZATIONS", "ANNEAL_OPERATOR_MFA", "ANNEAL_MAX_UPLOAD_BYTES", "ANNEAL_STALL_SECONDS",
    "ANNEAL_STORED_COMPLETION_DAYS", "ANNEAL_REPLICA_ADDRESSES", "ANNEAL_REPLICA_PLACES", "ANNEAL_MEDIA_HOSTS",
    "ANNEAL_WEB_REQUESTS_PER_MINUTE", "ANNEAL_WEB_SECONDS_PER_MINUTE", "ANNEAL_WEB_PLACES", "HF_ENDPOINT",
    "FORWARDED_ALLOW_IPS", "HF_BLOB_HOSTS", "ANNEAL_PRIVATE_WEBHOOKS", "ANNEAL_HUB_PUSHES",
    "ANNEAL_BRAND_NAME", "ANNEAL_BRAND_LOGO", "ANNEAL_BRAND_HUE", "ANNEAL_SUPPORT_EMAIL",
    "ANNEAL_BATCH_REDUCTION_PERCENT", "ANNEAL_WORKER_GATEWAY_URL",
    "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES",
})  # fmt: skip
# The mail server's password is in the URL: only for the one program that sends.
MAIL_OPTIONS = frozenset({"ANNEAL_EMAIL_URL", "ANNEAL_FROM_EMAIL"})
# For one program only: the web process receives webhooks with their own secret, and makes no calls.
STRIPE_OPTIONS = frozenset({
    "STRIPE_SECRET_KEY", "STRIPE_WEBHOOK_SECRET", "STRIPE_PORTAL_CONFIGURATION", "STRIPE_TAX", "STRIPE_METER",
    "STRIPE_API_BASE",
})  # fmt: skip
WORKER = frozenset({"ANNEAL_INTERNAL_URL", "ANNEAL_WORK_DIR", "ANNEAL_POOL", "ANNEAL_BASE_MODEL_ROOTS"})


class Tier(StrEnum):
    """Programs of a tier start and stop together. The last tier stops first.

    Web starts when the services answer and the database is prepared. It has the cores for itself, because people wait
    for its address. Control starts when web answers; serving and training start when control answers.
    """

    SERVICES = "services"
    WEB = "web"
    CONTROL = "control"
    SERVING = "serving"
    TRAINING = "training"


@dataclass(frozen=True)
class Program:
    """One long-running process.

    `command` begins with a module of `venv`'s Python; its `Place` fills the ${names}. Its variables are `needs` and
    those of `options` that are set. `role` is its database login; `stop_seconds` is how long it may take to stop. The
    program is left out if the variable `only_with` is not set, because it would have no work.
    """

    name: str
    tier: Tier
    command: str
    venv: str = ".venv"
    role: str | None = None
    settings: str = "${settings}"
    needs: frozenset[str] = CONTROL
    options: frozenset[str] = CONTROL_OPTIONS
    variables: tuple[tuple[str, str], ...] = ()
    threads: str = "1"
    stop_seconds: int = 15
    is_embedded_only: bool = False
    only_with: str = ""


_UVICORN = (
    "uvicorn --http apps.core.http.connections:Connection --no-server-header --no-access-log --no-proxy-headers "
    "--timeout-keep-alive 75 --timeout-graceful-shutdown 8"
)
DRAIN_SECONDS = 120  # limit for finishing streams that are running
_GATEWAY_UVICORN = (
    "uvicorn --http apps.interfaces.gateway.http.connections:GatewayConnection --no-server-header --no-date-header "
    f"--no-access-log --no-proxy-headers --timeout-keep-alive 75 --timeout-graceful-shutdown {DRAIN_SECONDS}"
)
_CELERY = "celery -A apps.config.celery"

_HUB_OPTIONS = frozenset({"HF_ENDPOINT", "HF_BLOB_HOSTS"})
_ENGINE_OPTIONS = frozenset({
    "ANNEAL_ENGINE_THREADS", "ANNEAL_ENGINE_MAX_LORAS", "ANNEAL_ENGINE_MAX_CPU_LORAS", "ANNEAL_ENGINE_MAX_LORA_RANK",
    "ANNEAL_ENGINE_MAX_QUEUED_REQUESTS", "ANNEAL_ENGINE_MAX_MODEL_LENGTH", "ANNEAL_ENGINE_DRAIN_SECONDS",
    "ANNEAL_ENGINE_EXTRA_ARGUMENTS", "ANNEAL_LOG_LEVEL",
})  # fmt: skip

PROGRAMS: tuple[Program, ...] = (
    Program(
        "postgres",
        Tier.SERVICES,
        "scripts.embedded postgres --data-dir ${home}",
        needs=frozenset(),
        options=frozenset(),
        stop_seconds=30,
        is_embedded_only=True,
    ),
    Program(
        "redis",
        Tier.SERVICES,
        "scripts.embedded redis --data-dir ${home}",
        needs=frozenset(),
        options=frozenset(),
        is_embedded_only=True,
    ),
    Program(
        "web",
        Tier.WEB,
        f"{_UVICORN} apps.config.asgi:application ${{web_listen}}",
        role="app",
        options=CONTROL_OPTIONS | STORE_OPTIONS | {"STRIPE_WEBHOOK_SECRET", "ANNEAL_MAIL_FOLDER"},
    ),
    Program(
        "internal",
        Tier.CONTROL,
        f"{_UVICORN} apps.config.asgi_internal:application ${{internal_listen}}",
        role="internal",
        settings="apps.config.settings.internal",
        options=CONTROL_OPTIONS | STORE_OPTIONS,
    ),
    Program(
        "gateway",
        Tier.CONTROL,
        f"{_GATEWAY_UVICORN} apps.interfaces.gateway.app:create_app --factory ${{gateway_listen}}",
        role="gateway",
        stop_seconds=DRAIN_SECONDS + 15,
    ),
    Program(
        "celery",
        Tier.CONTROL,
        f"{_CELERY} worker --queues control,hub --concurrency 1 --pool prefork --without-gossip --without-mingle",
        role="sys",
        options=CONTROL_OPTIONS | STORE_OPTIONS,
        stop_seconds=100,  # the hard limit of its tasks is 90 s
    ),
    Program(
        # Reading a customer's file takes minutes: it must not delay leases, mail and money.
        "celery-data",
        Tier.CONTROL,
        f"{_CELERY} worker --queues data --concurrency 1 --pool prefork --without-gossip --without-mingle",
        role="sys",
        options=CONTROL_OPTIONS | STORE_OPTIONS,
    ),
    Program(
        # A file of some megabytes takes seconds: it must not wait for a file of gigabytes.
        "celery-data-middle",
        Tier.CONTROL,
        f"{_CELERY} worker --queues data-middle --concurrency 1 --pool prefork --without-gossip --without-mingle",
        role="sys",
        options=CONTROL_OPTIONS | STORE_OPTIONS,
    ),
    Program(
        # A file of some rows takes a second: it must not wait for another tenant's gigabytes. An organization uses one
        # of the two places (apps/core/messages/outbox.py), so the other is for the rest.
        "celery-data-small",
        Tier.CONTROL,
        f"{_CELERY} worker --queues data-small --concurrency 2 --pool prefork --without-gossip --without-mingle",
        role="sys",
        options=CONTROL_OPTIONS | STORE_OPTIONS,
    ),
    Program(
        # Sends the requests of batches to the gateway and waits for the answers, in threads of one process.
        "celery-batches",
        Tier.CONTROL,
        f"{_CELERY} worker --queues batches --concurrency 1 --pool prefork --without-gossip --without-mingle",
        role="sys",
        options=CONTROL_OPTIONS | STORE_OPTIONS,
    ),
    Program(
        # Waits for the mail server as long as necessary. Alone in one process: it needs few resources.
        "celery-mail",
        Tier.CONTROL,
        f"{_CELERY} worker --queues mail --concurrency 1 --pool solo --without-gossip --without-mingle",
        role="sys",
        options=CONTROL_OPTIONS | MAIL_OPTIONS,
        stop_seconds=30,  # one message: twice EMAIL_TIMEOUT
    ),
    Program(
        # Calls addresses that customers chose. They may be slow, so several wait at once; each organization has one.
        "celery-webhooks",
        Tier.CONTROL,
        f"{_CELERY} worker --queues webhooks --concurrency 8 --pool threads --without-gossip --without-mingle",
        role="sys",
        options=CONTROL_OPTIONS,
        stop_seconds=30,  # one attempt takes up to 15 s
    ),
    Program(
        # Sends models to customers' repositories on the hub, for minutes. Large ones use two of three places,
        # and an organization one of each queue (apps/core/messages/outbox.py): small ones of others are sent meanwhile.
        "celery-hub-uploads",
        Tier.CONTROL,
        f"{_CELERY} worker --queues hub-uploads,hub-large --concurrency 3 --pool prefork"
        " --without-gossip --without-mingle",
        role="sys",
        options=CONTROL_OPTIONS | STORE_OPTIONS,
        only_with="ANNEAL_HUB_PUSHES",
    ),
    Program(
        # The only program with the key that moves money; a slow Stripe delays nothing else.
        "celery-payments",
        Tier.CONTROL,
        f"{_CELERY} worker --queues payments --concurrency 1 --pool prefork --without-gossip --without-mingle",
        role="sys",
        options=CONTROL_OPTIONS | STRIPE_OPTIONS,
        only_with="STRIPE_SECRET_KEY",
        stop_seconds=100,
    ),
    Program(
        "beat",
        Tier.CONTROL,
        f"{_CELERY} beat --schedule ${{home}}/celerybeat-schedule --pidfile ''",
        role="sys",
        options=CONTROL_OPTIONS | {"STRIPE_WEBHOOK_SECRET"},
    ),
    Program(
        "vllm",
        Tier.SERVING,
        "gpu_workers.engine.launcher",
        venv=".venv-engines",
        needs=frozenset({"ANNEAL_WORK_DIR"}),
        options=_ENGINE_OPTIONS
        | _HUB_OPTIONS
        | {"ANNEAL_ENGINE_KV_CACHE_BYTES", "ANNEAL_ENGINE_GPU_MEMORY_SHARE", "ANNEAL_MEDIA_HOSTS"},
        variables=(("ANNEAL_WORK_DIR", "${replica_dir}"),),
        threads="${engine_threads}",
        stop_seconds=60,
    ),
    Program(
        # Waits until the serving agent has a new adapter version to test, and runs a minute longer than the test.
        "vllm-canary",
        Tier.SERVING,
        "gpu_workers.engine.launcher canary",
        venv=".venv-engines",
        needs=frozenset({"ANNEAL_WORK_DIR"}),
        options=_ENGINE_OPTIONS | {"ANNEAL_CANARY_KV_CACHE_BYTES", "ANNEAL_CANARY_GPU_MEMORY_SHARE"},
        variables=(("ANNEAL_WORK_DIR", "${replica_dir}"),),
        threads="${engine_threads}",
        stop_seconds=60,
        only_with="ANNEAL_CANARY_ENGINE",
    ),
    Program(
        "serving-agent",
        Tier.SERVING,
        "gpu_workers.serving.agent",
        venv=".venv-engines",
        needs=WORKER | {"ANNEAL_REPLICA_LISTEN"},
        options=frozenset(
            {
                "ANNEAL_REPLICA_URL",
                "ANNEAL_REPLICA_CAPACITY",
                "ANNEAL_REPLICA_CACHE_BYTES",
                "ANNEAL_CANARY_ENGINE",
                "ANNEAL_ENGINE_DRAIN_SECONDS",
                "ANNEAL_LOG_LEVEL",
            }
        ),
        variables=(
            ("ANNEAL_WORK_DIR", "${replica_dir}"),
            ("ANNEAL_REPLICA_LISTEN", "${replica_listen}"),
            ("ANNEAL_WORKER_CREDENTIAL_FILE", "${home}/replica/credential.json"),
            ("ANNEAL_ENROLL_TOKEN_FILE", "${home}/replica/enroll.token"),
        ),
        stop_seconds=45,  # a third of ANNEAL_ENGINE_DRAIN_SECONDS to report, 2.5 s for routes, all of it for answers
    ),
    Program(
        "trainer",
        Tier.TRAINING,
        "celery -A gpu_workers.trainer.celery_app worker --queues train.${pool} --pool solo --prefetch-multiplier 1"
        " --without-gossip --without-mingle",
        venv=".venv-engines",
        needs=WORKER | {"ANNEAL_BROKER_KEY_PREFIX"},
        options=_HUB_OPTIONS | {"ANNEAL_TRAINER_THREADS", "ANNEAL_BASE_MODELS", "ANNEAL_GPU_KEY", "ANNEAL_LOG_LEVEL"},
        variables=(
            ("ANNEAL_WORK_DIR", "${trainer_dir}"),
            ("CELERY_BROKER_URL", "${trainer_broker_url}"),
            ("ANNEAL_WORKER_CREDENTIAL_FILE", "${home}/trainer/credential.json"),
            ("ANNEAL_ENROLL_TOKEN_FILE", "${home}/trainer/enroll.token"),
        ),
        stop_seconds=120,  # it saves a checkpoint, reports and returns within 110 s
    ),
)


class Place:
    """An environment for the programs: the values of the ${names}, and the command of each venv's Python."""

    def __init__(self, values: Mapping[str, str], *, pythons: Mapping[str, str]) -> None:
        self._values, self._pythons = dict(values), dict(pythons)

    def fill(self, text: str) -> str:
        return string.Template(text).substitute(self._values)

    def command(self, program: Program) -> list[str]:
        """Return the exact argument list of a program here."""
        words = [self._pythons[program.venv], "-m"]
        for word in shlex.split(program.command):
            # A path is one word, with all its spaces. Only the options of a server are several.
            words += shlex.split(self.fill(word)) if word.endswith("_listen}") else [self.fill(word)]
        return words

    def variables(
        self, program: Program, known: Mapping[str, str], *, database_urls: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the variables of a program beyond those of any process. Raises KeyError naming an unknown one."""
        threads = self.fill(program.threads)
        own = {name: self.fill(value) for name, value in program.variables}
        own |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        if program.role:
            own |= {"DATABASE_URL": database_urls[program.role], "DJANGO_SETTINGS_MODULE": self.fill(program.settings)}
            # Django's checks import every page: a second and 40 MB in each Celery process. `make check` runs them.
            own["CELERY_SKIP_CHECKS"] = "1"
        given = {name: known[name] for name in program.options if name in known}
        return given | {name: known[name] for name in program.needs if name not in own} | own


# In containers each service has its own machine: same commands, other addresses, Python on the path.
CONTAINER = Place(
    {
        "home": "/var/lib/anneal",
        "settings": "apps.config.settings.prod",
        "web_listen": "--host 0.0.0.0 --port 8000",
        "internal_listen": "--host 0.0.0.0 --port 8001",
        "gateway_listen": "--host 0.0.0.0 --port 8002",
        "pool": "${ANNEAL_POOL}",
        "trainer_dir": "/var/lib/anneal/trainer",
        "replica_dir": "/var/lib/anneal/replica",
        "replica_listen": "0.0.0.0:8003",
        "engine_threads": "0",
    },
    pythons={".venv": "python", ".venv-engines": "python"},
)
