"""The demonstration's organization, pools and prices, made by the operations that operators use."""

import datetime
import os
import secrets
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import msgspec
from django.conf import settings
from django.db import transaction

from apps.accounts.login.addresses import mark_verified
from apps.accounts.login.key_operations import issue_key
from apps.accounts.models import Organization, User
from apps.accounts.operations import create_organization
from apps.accounts.queries import find_key
from apps.accounts.roles import SCOPES, Permission
from apps.billing.operations import grant_credit
from apps.catalog.models import BaseModel, GpuType
from apps.catalog.operations import set_price
from apps.catalog.queries import active_price
from apps.catalog.seeding import DEMO_MODEL
from apps.contracts.addresses.replicas import AddressRefused
from apps.contracts.worker_api import EnrollResponse
from apps.core.money import NANO_PER_USD, usd_to_nano
from apps.finetuning.models import GpuPool, WorkerKind
from apps.finetuning.pools.operations import (
    FIRM_FACTOR,
    MAX_FIRM_FACTOR,
    InvalidWorkerCredential,
    authenticate,
    create_pool,
    issue_worker_token,
)
from apps.finetuning.quotes.pool_facts import training_sku
from apps.serving.models import Replica

EMAIL = "demo@anneal.localhost"
# The password that earlier versions gave every installation. It is replaced at the next start.
_FORMER_PASSWORD = "anneal-demo-password"  # noqa: S105 - publicly known, and refused
ORGANIZATION = "Northline Support"
LOCAL_POOL = "local-cpu"
STARTING_CREDIT_NANO = 25 * NANO_PER_USD
_HOUR_MS = 3_600_000
_DEMO_SCOPES = frozenset(SCOPES) - {Permission.KEY_MANAGE, Permission.MEMBER_MANAGE, Permission.ORGANIZATION_MANAGE}
_LOCAL_PRICE_NANO = 600_000_000  # $0.60 per hour: an example for the operator to change
# Pools that can be quoted before a worker connects, at the first on-demand price in their catalogue row.
_QUOTED_POOLS = (("l4", "l4-24"), ("l40s", "l40s-48"), ("a100-80", "a100-sxm-80"), ("h100", "h100-sxm-80"))


class DemoAccount(msgspec.Struct, frozen=True):
    """The sign-in data of the main job and its reader, kept in one file that only its owner may read."""

    email: str
    password: str
    organization_id: str
    api_key: str
    base_model: str
    pool: str


@dataclass(frozen=True)
class SeededInstallation:
    account: DemoAccount
    is_new: bool


def seed_local_workers(*, home: Path, now: datetime.datetime) -> None:
    """Create missing pools and put a token where each local worker looks for it. Safe to run again."""
    _seed_pools(now)
    pool = GpuPool.objects.get(name=LOCAL_POOL)
    base_model = BaseModel.objects.get(name=DEMO_MODEL)
    for kind, model in ((WorkerKind.TRAINER, None), (WorkerKind.REPLICA, base_model)):
        credential, token = home / kind / "credential.json", home / kind / "enroll.token"
        if not _is_enrolled(credential) or (kind == WorkerKind.REPLICA and not _is_reachable(credential)):
            credential.unlink(missing_ok=True)
            _write_private(token, issue_worker_token(pool=pool, kind=kind, base_model=model, by="system").encode())


def seed_account(*, home: Path, now: datetime.datetime) -> SeededInstallation:
    """Create the demonstration's operator, organization and key, and return how to sign in. Safe to run again.

    The password is random and stored only in `demo.json`. The account is an operator's, so it must not exist in an
    installation that others can reach.
    """
    path = home / "demo.json"
    kept = _kept_account(path)
    if kept is not None:
        path.chmod(0o600)  # from a launch before the launcher set a umask
        return SeededInstallation(kept, is_new=False)
    account = _new_account(now)
    _write_private(path, msgspec.json.format(msgspec.json.encode(account)))
    return SeededInstallation(account, is_new=True)


def _kept_account(path: Path) -> DemoAccount | None:
    try:
        account = msgspec.json.decode(path.read_bytes(), type=DemoAccount)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    is_usable = account.password != _FORMER_PASSWORD and find_key(secret=account.api_key)
    return account if is_usable else None


@transaction.atomic
def _new_account(now: datetime.datetime) -> DemoAccount:
    user, password = _operator()
    organization = Organization.objects.filter(name=ORGANIZATION).first() or create_organization(
        name=ORGANIZATION, owner=user, now=now
    )
    grant_credit(
        organization=organization,
        amount_nano=STARTING_CREDIT_NANO,
        by="system",
        reason="Starting credit",
        idempotency_key=f"starting-credit:{organization.pk}",
    )
    issued = issue_key(organization=organization, name="Demo", scopes=_DEMO_SCOPES, by=user, expires_at=None, now=now)
    return DemoAccount(EMAIL, password, organization.pk, issued.secret, DEMO_MODEL, LOCAL_POOL)


def _operator() -> tuple[User, str]:
    """Return the demonstration's operator with a new random password, which ends earlier sessions."""
    password = secrets.token_urlsafe(12)
    user = User.objects.filter(email=EMAIL).first()
    if user is None:
        user = User.objects.create_user(EMAIL, password, name="Mira Okafor", is_operator=True)
    else:
        user.set_password(password)
        user.save(update_fields=["password"])
    mark_verified(user=user)
    return user, password


@transaction.atomic
def _seed_pools(now: datetime.datetime) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # the other half serves and stores
    _seed_pool(LOCAL_POOL, "cpu", memory_bytes, _LOCAL_PRICE_NANO, now)
    for name, gpu_key in _QUOTED_POOLS:
        gpu_type = GpuType.objects.get(pk=gpu_key)
        published = next(row for row in gpu_type.specification["prices"] if row["kind"].startswith("on_demand"))
        price_nano = usd_to_nano(Decimal(str(published["usd_per_gpu_hour"])))
        _seed_pool(name, gpu_key, gpu_type.memory_bytes, price_nano, now)


def _seed_pool(name: str, gpu_key: str, memory_bytes: int, price_nano: int, now: datetime.datetime) -> None:
    pool = GpuPool.objects.filter(name=name).first() or create_pool(
        name=name,
        gpu_type=GpuType.objects.get(pk=gpu_key),
        memory_bytes=memory_bytes,
        firm_factor=Decimal(MAX_FIRM_FACTOR) if gpu_key == "cpu" else FIRM_FACTOR,  # a busy machine slows runs a lot
        by="system",
    )
    sku = training_sku(pool)
    if active_price(sku=sku) is None:
        set_price(sku=sku, unit="gpu_ms", price_nano=price_nano, per=_HOUR_MS, by="system", now=now)


def _is_enrolled(credential: Path) -> bool:
    """Return whether the file holds a credential that this database accepts."""
    try:
        authenticate(credential=msgspec.json.decode(credential.read_bytes(), type=EnrollResponse).credential)
    except (FileNotFoundError, msgspec.DecodeError, InvalidWorkerCredential):
        return False
    return True


def _is_reachable(credential: Path) -> bool:
    """Return whether the replica's address is allowed by the settings. A moved home folder has its socket elsewhere."""
    enrollment = msgspec.json.decode(credential.read_bytes(), type=EnrollResponse)
    url = Replica.objects.values_list("url", flat=True).filter(pk=enrollment.replica_id).first()
    try:
        return url is not None and settings.REPLICA_ADDRESSES.check(url)
    except AddressRefused:
        return False


def _write_private(path: Path, content: bytes) -> None:
    """Replace the file atomically: after a kill at any moment, it has the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(path.name + ".part")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
