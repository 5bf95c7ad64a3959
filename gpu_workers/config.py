"""Settings of a worker, read from the environment once; the only reader of it on the worker side."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec


class ConfigError(Exception):
    """A variable is missing or unusable; the message names it."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`credential_file` appears at enrolment (mode 0600); `enroll_token_file` is read only while it does not exist."""

    internal_url: str  # http(s)://host:port, or unix:/path/of/socket
    credential_file: Path
    work_dir: Path
    enroll_token_file: Path | None = None
    pool: str = "cpu"
    broker_url: str = ""
    broker_key_prefix: str = ""
    trainer_threads: int = 0  # 0: every core
    base_model_roots: tuple[Path, ...] = ()  # a base model's local path must lie inside one of these
    base_models: tuple[str, ...] | None = None  # ids installed here; None: will download
    self_check_gpu_key: str | None = None  # set where NVML's name is not a key of the catalog
    log_level: str = "INFO"

    def require_broker_url(self) -> str:
        """Return the broker's URL; raises ConfigError when there is none."""
        if not self.broker_url:
            raise ConfigError("CELERY_BROKER_URL is not set.")
        return self.broker_url


def read_config(environ: Mapping[str, str] | None = None) -> WorkerConfig:
    """Read the environment; raises ConfigError naming the first variable that is missing or wrong."""
    env = os.environ if environ is None else environ
    work_dir = Path(_required(env, "ANNEAL_WORK_DIR"))
    token_file = env.get("ANNEAL_ENROLL_TOKEN_FILE")
    return WorkerConfig(
        internal_url=_required(env, "ANNEAL_INTERNAL_URL").rstrip("/"),
        credential_file=Path(env.get("ANNEAL_WORKER_CREDENTIAL_FILE") or work_dir / "credential.json"),
        work_dir=work_dir,
        enroll_token_file=Path(token_file) if token_file else None,
        pool=env.get("ANNEAL_POOL", "cpu"),
        broker_url=env.get("CELERY_BROKER_URL", ""),
        broker_key_prefix=env.get("ANNEAL_BROKER_KEY_PREFIX", ""),
        trainer_threads=_integer(env, "ANNEAL_TRAINER_THREADS", 0),
        base_model_roots=tuple(Path(p).resolve() for p in env.get("ANNEAL_BASE_MODEL_ROOTS", "").split(":") if p),
        base_models=_optional_list(env, "ANNEAL_BASE_MODELS"),
        self_check_gpu_key=env.get("ANNEAL_GPU_KEY") or None,
        log_level=env.get("ANNEAL_LOG_LEVEL", "INFO"),
    )


def child_environment(*, threads: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a training child: this process's own without any Anneal, broker or cloud secret."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SECRET_PREFIXES)}
    fixed = {} if threads <= 0 else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return kept | fixed | dict(extra or {})


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


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name, "")
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, not {value!r}.") from None


def _optional_list(env: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    value = env.get(name)
    return None if value is None else tuple(item for item in value.split(",") if item)
