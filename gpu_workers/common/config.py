"""Settings of a worker, read from the environment once; only this module reads it on the worker side."""

import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

from apps.contracts.addresses.hub import HubAddresses

REPOSITORY = Path(__file__).resolve().parents[2]  # where `python -m` finds our modules
DEFAULT_WORK_DIR = Path("~/.anneal-worker")
CANARY_FOLDER = "canary"  # in the replica's folder: shared by the canary engine and the serving agent


class ConfigError(Exception):
    """A variable is missing or invalid; the message names it."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of any worker. `credential_file` (mode 0600) is created by enrolment.

    `enroll_token_file` is read only while `credential_file` does not exist.
    """

    internal_url: str  # http(s)://host:port, or unix:/path/of/socket
    credential_file: Path
    work_dir: Path
    enroll_token_file: Path | None = None
    pool: str = "cpu"
    broker_url: str = ""
    broker_key_prefix: str = ""
    trainer_thread_limit: int = 0  # of a training child; 0: one for each free core
    base_model_roots: tuple[Path, ...] = ()  # a base model's local path must lie inside one of these
    base_models: tuple[str, ...] | None = None  # ids installed here; None: downloads them
    self_check_gpu_key: str | None = None  # set if NVML's name is not a key of the catalog
    node_address: str = ""  # where other machines reach this one; "": it trains alone
    replica_port: int = 0  # of a machine that was started to serve; 0: a free one
    log_level: str = "INFO"

    def require_broker_url(self) -> str:
        """Return the broker's URL; raises ConfigError if none is set."""
        if not self.broker_url:
            raise ConfigError("CELERY_BROKER_URL is not set.")
        return self.broker_url


def read_config(environ: Mapping[str, str] | None = None) -> WorkerConfig:
    """Read the environment; raises ConfigError naming the first variable that is missing or wrong."""
    env = os.environ if environ is None else environ
    work_dir = _work_dir(env)
    token_file = env.get("ANNEAL_ENROLL_TOKEN_FILE")
    return WorkerConfig(
        internal_url=_required(env, "ANNEAL_INTERNAL_URL").rstrip("/"),
        credential_file=Path(env.get("ANNEAL_WORKER_CREDENTIAL_FILE") or work_dir / "credential.json"),
        work_dir=work_dir,
        enroll_token_file=Path(token_file) if token_file else None,
        pool=env.get("ANNEAL_POOL", "cpu"),
        broker_url=env.get("CELERY_BROKER_URL", ""),
        broker_key_prefix=env.get("ANNEAL_BROKER_KEY_PREFIX", ""),
        trainer_thread_limit=_integer(env, "ANNEAL_TRAINER_THREADS", 0),
        base_model_roots=tuple(Path(p).resolve() for p in env.get("ANNEAL_BASE_MODEL_ROOTS", "").split(":") if p),
        base_models=_optional_list(env, "ANNEAL_BASE_MODELS"),
        self_check_gpu_key=read_gpu_key(env),
        node_address=env.get("ANNEAL_NODE_ADDRESS", ""),
        replica_port=_integer(env, "ANNEAL_REPLICA_PORT", 0),
        log_level=(env.get("ANNEAL_LOG_LEVEL") or "INFO").upper(),
    )


def read_gpu_key(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the catalogue's key of this machine's GPUs if the environment sets one, instead of the driver's name."""
    env = os.environ if environ is None else environ
    return env.get("ANNEAL_GPU_KEY") or None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of vLLM. `work_dir` is the serving agent's; only the socket inside it is shared."""

    work_dir: Path
    base_model_path: str = ""  # with `served_name`: serve this, not the model of the agent's enrolment
    served_name: str = ""
    threads: int = 1
    max_loras: int = 8
    max_cpu_loras: int = 64
    max_lora_rank: int = 64  # every rank that can be trained; an adapter pays for the limit, not for its own rank
    max_queued_requests: int = 512  # sequences; enough for two gateways
    max_model_length: int = 0  # 0: the model's own
    kv_cache_bytes: int = 0  # 0: vLLM decides on a GPU, a small fixed share on a CPU
    gpu_memory_share: float = 0.0  # of the card's memory, for weights, adapters and cache together; 0: vLLM's default
    drain_seconds: int = 30
    media_hosts: tuple[str, ...] = ()  # hosts it may fetch images and audio from; the gateways have the same list
    extra_arguments: tuple[str, ...] = ()
    is_canary: bool = False  # tries new adapter versions for the engine of all customers (canary_engine.py)


class ServingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the serving agent beyond a worker's."""

    worker: WorkerConfig
    listen: str  # a Unix socket's path, or 127.0.0.1:port
    url: str = ""  # the gateway's address of `listen`, if it differs
    capacity: int = 0  # adapters registered at once; 0: as many as the engine's cache holds, less one for each slot
    cache_bytes: int = 50 * 2**30  # limit for the adapters on the local disk, excluding those the engine may read
    drain_seconds: int = 30  # wait for running answers after SIGTERM
    has_canary_engine: bool = False  # a separate engine loads each new version first

    @property
    def models_dir(self) -> Path:
        """Return the folder of a whole model, which is served alone; the path is the same for agent and engine."""
        return self.worker.work_dir.resolve() / "models"

    @property
    def reached_at(self) -> str:
        """Return the address at which the gateway reaches the proxy."""
        if self.url:
            return self.url
        if self.listen.startswith(("/", "unix:")):
            return "unix:///" + self.listen.removeprefix("unix:").lstrip("/")
        return f"http://{self.listen}"


def read_engine_config(environ: Mapping[str, str] | None = None, *, is_canary: bool = False) -> EngineConfig:
    """Read the environment; raises ConfigError naming the first variable that is missing or wrong.

    A canary engine has the settings of the replica's own engine, except its folder and its share of the memory.
    """
    env = os.environ if environ is None else environ
    max_loras = _integer(env, "ANNEAL_ENGINE_MAX_LORAS", 8)
    work_dir, memory = _work_dir(env).resolve(), "ANNEAL_CANARY" if is_canary else "ANNEAL_ENGINE"
    return EngineConfig(
        work_dir=work_dir / CANARY_FOLDER if is_canary else work_dir,
        is_canary=is_canary,
        base_model_path="" if is_canary else env.get("ANNEAL_ENGINE_BASE_MODEL_PATH", ""),
        served_name=env.get("ANNEAL_ENGINE_SERVED_NAME", ""),
        threads=_integer(env, "ANNEAL_ENGINE_THREADS", 1),
        max_loras=max_loras,
        max_cpu_loras=_integer(env, "ANNEAL_ENGINE_MAX_CPU_LORAS", 8 * max_loras),
        max_lora_rank=_integer(env, "ANNEAL_ENGINE_MAX_LORA_RANK", 64),
        max_queued_requests=_integer(env, "ANNEAL_ENGINE_MAX_QUEUED_REQUESTS", 512),
        max_model_length=_integer(env, "ANNEAL_ENGINE_MAX_MODEL_LENGTH", 0),
        kv_cache_bytes=_integer(env, f"{memory}_KV_CACHE_BYTES", 0),
        gpu_memory_share=_share(env, f"{memory}_GPU_MEMORY_SHARE"),
        drain_seconds=_integer(env, "ANNEAL_ENGINE_DRAIN_SECONDS", 30),
        media_hosts=_optional_list(env, "ANNEAL_MEDIA_HOSTS") or (),
        extra_arguments=tuple(shlex.split(env.get("ANNEAL_ENGINE_EXTRA_ARGUMENTS", ""))),
    )


def read_serving_config(environ: Mapping[str, str] | None = None) -> ServingConfig:
    """Read the environment; raises ConfigError naming the first variable that is missing or wrong."""
    env = os.environ if environ is None else environ
    return ServingConfig(
        worker=read_config(env),
        listen=_required(env, "ANNEAL_REPLICA_LISTEN"),
        url=env.get("ANNEAL_REPLICA_URL", ""),
        capacity=_integer(env, "ANNEAL_REPLICA_CAPACITY", 0),
        cache_bytes=_integer(env, "ANNEAL_REPLICA_CACHE_BYTES", 50 * 2**30),
        drain_seconds=_integer(env, "ANNEAL_ENGINE_DRAIN_SECONDS", 30),
        has_canary_engine=_switch(env, "ANNEAL_CANARY_ENGINE"),
    )


def child_environment(
    *,
    threads: int,
    devices: Sequence[str] | None = None,
    extra: Mapping[str, str] | None = None,
    has_network: bool = False,
) -> dict[str, str]:
    """Return the environment of a training child: this process's own without any Anneal, broker or cloud secret.

    A child that needs no network gets no variable of a proxy, such as HTTPS_PROXY. With `devices` the child sees only
    these GPUs, because transformers trains on all visible ones.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SECRET_PREFIXES)}
    if not has_network:
        kept = {name: value for name, value in kept.items() if not name.upper().endswith("_PROXY")}
    fixed = {} if threads <= 0 else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if devices is not None:
        fixed["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return kept | fixed | dict(extra or {})


def hub_addresses() -> HubAddresses:
    """Return the hub of this process's environment, with the hosts that it may redirect downloads to."""
    hosts = os.environ.get("HF_BLOB_HOSTS", "").lower().split(",")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    return HubAddresses(endpoint=endpoint, blob_hosts=tuple(host.strip() for host in hosts if host.strip()))


def downloading_environment(hub_token: str | None) -> dict[str, str]:
    """Return this process's environment with the token. Without a token, the settings of the machine's owner apply."""
    return environment_with({"HF_TOKEN": hub_token} if hub_token else {})


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with these variables."""
    return dict(os.environ) | dict(variables)


def visible_devices() -> tuple[str, ...] | None:
    """Return the GPUs to which CUDA_VISIBLE_DEVICES limits this process; None without a limit.

    As in CUDA, the entry -1 hides all entries after it.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = (each.strip() for each in value.split(","))
    return tuple(takewhile(lambda name: name != "-1", filter(None, names)))


def replace_environment(environment: Mapping[str, str]) -> None:
    """Give this process another environment, such as that of `child_environment` after a fork."""
    os.environ.clear()
    os.environ.update(environment)


def rank_environment(
    *,
    index: int,
    count: int,
    port: int,
    host: str = "127.0.0.1",
    before: int = 0,
    local_count: int | None = None,
    interface: str = "",
) -> dict[str, str]:
    """Return the environment of one of several training processes, with the names that torch and accelerate read.

    `index` counts on this machine, `before` is the number of processes on the machines before it, and `count` that of
    all. They meet at `host`, and connect over `interface` if it is given.
    """
    place = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "RANK": str(before + index)}
    local = {"LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": str(local_count or count)}
    network = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    return dict(os.environ) | place | local | network


def read_launch_environment() -> tuple[int, int, int] | None:
    """Return this process's index among all and on its machine, and the number of all; None if it started alone."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    rank, local_rank, count = (os.environ.get(name) for name in names)
    if rank is None or count is None:
        return None
    return int(rank), int(local_rank or rank), int(count)


_SECRET_PREFIXES = (
    "ANNEAL_",
    "CELERY_",
    "AWS_",
    "DATABASE_",
    "REDIS_",
    "STRIPE_",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
)


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise ConfigError(f"{name} is not set.")
    return value


def _work_dir(env: Mapping[str, str]) -> Path:
    return Path(env.get("ANNEAL_WORK_DIR") or DEFAULT_WORK_DIR.expanduser())


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name, "")
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, not {value!r}.") from None


def _share(env: Mapping[str, str], name: str) -> float:
    value = env.get(name) or "0"
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ConfigError(f"{name} must be a part of 1, such as 0.25, not {value!r}.")
    return share


def _switch(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name) or "off"
    if value not in ("on", "off"):
        raise ConfigError(f"{name} must be on or off, not {value!r}.")
    return value == "on"


def _optional_list(env: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    value = env.get(name)
    return None if value is None else tuple(item for item in value.split(",") if item)
