"""The only reader of the process environment: one frozen Env. Missing or malformed variables raise."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from apps.contracts.addresses.networks import is_loopback
from apps.core.money import parse_usd

ROOT = Path(__file__).resolve().parents[2]
_LOGO_BYTES = 64 * 1024
SAMPLERS = (
    "always_on", "always_off", "parentbased_always_on", "parentbased_always_off", "traceidratio",
    "parentbased_traceidratio",
)  # fmt: skip


class MissingVariable(Exception):
    """A required variable is missing. The message says how to set it."""


class MalformedVariable(Exception):
    """A variable's value cannot be read. The message names the accepted values."""


@dataclass(frozen=True)
class Env:
    """The addresses and settings of this process. See the configuration table in README.md."""

    home: Path
    debug: bool
    secret_key: str
    secret_key_fallbacks: tuple[str, ...]
    key_pepper: str
    signing_key: str
    database_url: str
    redis_url: str
    broker_url: str
    public_url: str
    internal_url: str
    gateway_url: str
    worker_gateway_url: str
    object_store: str
    backup_keys: tuple[str, str] | None
    email_url: str
    mail_folder: str
    from_email: str
    base_model_roots: tuple[Path, ...]
    hub_url: str
    hub_blob_hosts: tuple[str, ...]
    hub_pushes: bool
    allowed_hosts: tuple[str, ...]
    api_origins: tuple[str, ...]
    stripe_secret_key: str
    stripe_webhook_secret: str
    stripe_portal: str
    stripe_tax: bool
    stripe_meter: str
    stripe_api_base: str
    replica_places: int
    media_hosts: tuple[str, ...]
    replica_addresses: tuple[str, ...]
    max_upload_bytes: int
    stall_seconds: int
    traces_endpoint: str
    stored_completion_days: int
    operator_mfa: bool
    private_webhooks: bool
    most_unpaid_organizations: int
    welcome_credit_nano: int
    batch_reduction_percent: int
    brand_name: str
    brand_hue: int | None
    brand_logo: Path | None
    support_email: str
    trusted_proxies: str
    web_requests_per_minute: int
    web_seconds_per_minute: int
    web_places: int


@cache
def read_env() -> Env:
    """Return the environment of this process. Raises MissingVariable."""
    return _parse(os.environ)


def _parse(environ: Mapping[str, str]) -> Env:
    home = Path(environ.get("ANNEAL_HOME", ROOT / ".anneal"))
    brand_name = environ.get("ANNEAL_BRAND_NAME") or "Anneal"
    public_url = environ.get("ANNEAL_PUBLIC_URL", "http://127.0.0.1:8000")
    return Env(
        home=home,
        debug=environ.get("ANNEAL_DEBUG", "") == "1",
        secret_key=_required(environ, "ANNEAL_SECRET_KEY"),
        secret_key_fallbacks=_listed(environ.get("ANNEAL_SECRET_KEY_FALLBACKS", "")),
        key_pepper=_required(environ, "ANNEAL_KEY_PEPPER"),
        signing_key=_required(environ, "ANNEAL_SIGNING_KEY"),
        database_url=_required(environ, "DATABASE_URL"),
        redis_url=_required(environ, "REDIS_URL"),
        broker_url=environ.get("CELERY_BROKER_URL") or _required(environ, "REDIS_URL"),
        public_url=public_url.rstrip("/"),
        internal_url=environ.get("ANNEAL_INTERNAL_URL", "http://127.0.0.1:8001").rstrip("/"),
        gateway_url=environ.get("ANNEAL_GATEWAY_URL", f"unix://{home}/run/gateway.sock"),
        worker_gateway_url=(environ.get("ANNEAL_WORKER_GATEWAY_URL") or public_url).rstrip("/"),
        object_store=environ.get("ANNEAL_OBJECT_STORE", f"file://{quote(str(home))}/objects"),
        backup_keys=_backup_keys(environ),
        email_url=environ.get("ANNEAL_EMAIL_URL", "console://"),
        mail_folder=environ.get("ANNEAL_MAIL_FOLDER", ""),
        from_email=environ.get("ANNEAL_FROM_EMAIL", f"{brand_name} <anneal@localhost>"),
        base_model_roots=tuple(Path(part) for part in environ.get("ANNEAL_BASE_MODEL_ROOTS", "").split(":") if part),
        hub_url=environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/"),
        hub_blob_hosts=_listed(environ.get("HF_BLOB_HOSTS", "").lower()),
        hub_pushes=environ.get("ANNEAL_HUB_PUSHES", "") == "1",
        allowed_hosts=_listed(environ.get("ANNEAL_ALLOWED_HOSTS", "")),
        api_origins=_listed(environ.get("ANNEAL_API_ORIGINS", "").lower()),
        stripe_secret_key=environ.get("STRIPE_SECRET_KEY", ""),
        stripe_webhook_secret=environ.get("STRIPE_WEBHOOK_SECRET", ""),
        stripe_portal=environ.get("STRIPE_PORTAL_CONFIGURATION", ""),
        stripe_tax=environ.get("STRIPE_TAX", "") == "1",
        stripe_meter=environ.get("STRIPE_METER", ""),
        stripe_api_base=environ.get("STRIPE_API_BASE", ""),
        replica_places=int(environ.get("ANNEAL_REPLICA_PLACES", "256")),
        media_hosts=_listed(environ.get("ANNEAL_MEDIA_HOSTS", "").lower()),
        replica_addresses=_listed(environ.get("ANNEAL_REPLICA_ADDRESSES", f"unix://{home.resolve()}")),
        max_upload_bytes=int(environ.get("ANNEAL_MAX_UPLOAD_BYTES", 8 * 1024**3)),
        traces_endpoint=_traces_endpoint(environ),
        stall_seconds=max(int(environ.get("ANNEAL_STALL_SECONDS", "900")), 60),
        stored_completion_days=max(int(environ.get("ANNEAL_STORED_COMPLETION_DAYS", "30")), 1),
        most_unpaid_organizations=int(environ.get("ANNEAL_MOST_UNPAID_ORGANIZATIONS", "3")),
        welcome_credit_nano=_dollars(environ, "ANNEAL_WELCOME_CREDIT_USD"),
        batch_reduction_percent=_reduction(environ),
        brand_name=brand_name,
        brand_hue=_hue(environ),
        brand_logo=_logo(environ),
        support_email=environ.get("ANNEAL_SUPPORT_EMAIL", ""),
        operator_mfa=_switch(environ, "ANNEAL_OPERATOR_MFA", default=not is_loopback(public_url)),
        private_webhooks=environ.get("ANNEAL_PRIVATE_WEBHOOKS", "") == "1",
        trusted_proxies=environ.get("FORWARDED_ALLOW_IPS", ""),
        web_requests_per_minute=int(environ.get("ANNEAL_WEB_REQUESTS_PER_MINUTE", "600")),
        web_seconds_per_minute=int(environ.get("ANNEAL_WEB_SECONDS_PER_MINUTE", "20")),
        web_places=int(environ.get("ANNEAL_WEB_PLACES", "8")),
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def _traces_endpoint(environ: Mapping[str, str]) -> str:
    """Return the base URL of the operator's collector; "" without traces. Raises MalformedVariable."""
    url = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if url and not url.startswith(("http://", "https://")):
        raise MalformedVariable(f"OTEL_EXPORTER_OTLP_ENDPOINT is a URL such as http://collector:4318, not {url!r}.")
    if url:
        _check_sampler(environ)
    return url


def _check_sampler(environ: Mapping[str, str]) -> None:
    """Raise MalformedVariable for a sampler in place of which the SDK would sample everything."""
    name, share = environ.get("OTEL_TRACES_SAMPLER", ""), environ.get("OTEL_TRACES_SAMPLER_ARG", "")
    if name and name.lower() not in SAMPLERS:
        raise MalformedVariable(f"OTEL_TRACES_SAMPLER is one of {', '.join(SAMPLERS)}, not {name!r}.")
    if name.lower().endswith("traceidratio"):
        try:
            is_share = 0 <= float(share) <= 1
        except ValueError:
            is_share = False
        if not is_share:
            raise MalformedVariable(f"OTEL_TRACES_SAMPLER_ARG is the share of {name}, such as 0.05, not {share!r}.")


def _switch(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Read `on` or `off`. Raises MalformedVariable for other values: a typing error must not switch security off."""
    match environ.get(name, ""):
        case "":
            return default
        case "on":
            return True
        case "off":
            return False
        case other:
            raise MalformedVariable(f"{name} is on or off, not {other!r}.")


def _dollars(environ: Mapping[str, str], name: str) -> int:
    """Read an amount in dollars as nano-USD; return 0 if it is not set. Raises MalformedVariable."""
    text = environ.get(name, "") or "0"
    try:
        nano = parse_usd(text)
    except ValueError as error:
        raise MalformedVariable(f"{name} is an amount in dollars such as 5 or 2.50, not {text!r}.") from error
    if nano < 0:
        raise MalformedVariable(f"{name} must not be negative, and is {text}.")
    return nano


def _reduction(environ: Mapping[str, str]) -> int:
    """Read by how many percent tokens of batches are cheaper. Raises MalformedVariable."""
    text = environ.get("ANNEAL_BATCH_REDUCTION_PERCENT", "") or "50"
    if not (text.isascii() and text.isdecimal() and int(text) < 100):
        raise MalformedVariable(f"ANNEAL_BATCH_REDUCTION_PERCENT is a whole number from 0 to 99, not {text!r}.")
    return int(text)


def _hue(environ: Mapping[str, str]) -> int | None:
    """Read an angle of the colour wheel; return None if it is not set. Raises MalformedVariable."""
    text = environ.get("ANNEAL_BRAND_HUE", "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) < 360):
        raise MalformedVariable(f"ANNEAL_BRAND_HUE is a whole number from 0 to 359, not {text!r}.")
    return int(text)


def _logo(environ: Mapping[str, str]) -> Path | None:
    """Return the path of an SVG file; return None if it is not set. Raises MalformedVariable."""
    text = environ.get("ANNEAL_BRAND_LOGO", "")
    if not text:
        return None
    path = Path(text)
    if path.suffix != ".svg" or not path.is_file() or path.stat().st_size > _LOGO_BYTES:
        raise MalformedVariable(f"ANNEAL_BRAND_LOGO is the path of an SVG file of at most 64 KiB, not {text!r}.")
    return path


def _backup_keys(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the key ID and secret of the backup's bucket; None if it is opened with the installation's own."""
    key_id, secret = (environ.get(f"BACKUP_AWS_{name}", "") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    if bool(key_id) != bool(secret):
        raise MalformedVariable("Set both BACKUP_AWS_ACCESS_KEY_ID and BACKUP_AWS_SECRET_ACCESS_KEY, or neither.")
    return (key_id, secret) if key_id else None


def _required(environ: Mapping[str, str], name: str) -> str:
    if value := environ.get(name):
        return value
    raise MissingVariable(
        f"{name} is not set: `make dev` sets everything; elsewhere see the configuration table in README.md"
    )
