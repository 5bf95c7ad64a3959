"""Operator actions on GPU pools and their workers, and authentication of workers."""

import datetime
import secrets
from decimal import Decimal

from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.models import Region, home_region, is_allowed
from apps.accounts.queries import regions_of
from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.models import AdapterVersion
from apps.adapters.queries import find_whole_model
from apps.catalog.models import BaseModel, GpuType
from apps.contracts.worker_api import EnrollRequest, EnrollResponse
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, InvalidState, InvalidValue, NotFound, Status
from apps.finetuning.models import (
    CapacityKind,
    CapacityNode,
    GpuPool,
    PoolCapacity,
    PricePolicy,
    ThroughputProbe,
    Worker,
    WorkerKind,
    WorkerToken,
)
from apps.finetuning.pools.capacity.settings import require_only_fleets
from apps.finetuning.runs.leases import sha256_hex
from apps.serving.models import Replica

_TOKEN_LIFE = datetime.timedelta(hours=24)
FIRM_FACTOR, MAX_FIRM_FACTOR = Decimal(3), 10
_MAX_INTERRUPTIONS_PER_HOUR = 12.0  # with more than one in five minutes no job makes progress


class InvalidWorkerCredential(DomainError):
    """The credential or one-time token is not (or no longer) accepted."""

    code = "invalid_worker_credential"
    status = Status.UNAUTHENTICATED


@transaction.atomic
def create_pool(
    *,
    name: str,
    gpu_type: GpuType,
    memory_bytes: int,
    region: str = "",
    interruptions_per_hour: float | None = None,
    price_policy: str = PricePolicy.FIRM,
    firm_factor: Decimal = FIRM_FACTOR,
    borrows_from: GpuPool | None = None,
    by: str,
) -> GpuPool:
    """Open a pool, of spot machines if interruptions are expected. Without a region, it is where the object store is.

    One that borrows from another pool has its machines, and is in its region. Raises InvalidValue, also for a name
    already in use.
    """
    if GpuPool.objects.filter(name=name).exists():
        raise InvalidValue(gettext("A pool named %(name)s already exists.") % {"name": repr(name)}, param="name")
    if borrows_from is not None:
        _require_lender(borrows_from, gpu_type=gpu_type, interruptions_per_hour=interruptions_per_hour)
        region = borrows_from.region_id
    pool = GpuPool.objects.create(
        name=name,
        gpu_type=gpu_type,
        region_id=_known_region(region or home_region()),
        memory_bytes=memory_bytes,
        borrows_from=borrows_from,
        **_spot(interruptions_per_hour),
        **_policy(price_policy, firm_factor),
    )
    audit.record(
        organization=None, by=by, action="pool.created", target=pool.pk, name=name, region=pool.region_id,
        borrows_from=borrows_from.name if borrows_from else "",
    )  # fmt: skip
    return pool


@transaction.atomic
def edit_pool(
    *,
    pool: GpuPool,
    region: str,
    memory_bytes: int,
    is_open: bool,
    serves_whole_models: bool = False,
    interruptions_per_hour: float | None = None,
    price_policy: str = PricePolicy.FIRM,
    firm_factor: Decimal = FIRM_FACTOR,
    by: str,
) -> GpuPool:
    """Change a pool's settings. Jobs keep the price policy they were launched with.

    Its name and GPU type cannot change: its price and history use them. Its replicas are in its region, and so are the
    pools that borrow from it. Raises InvalidValue.
    """
    if pool.borrows_from_id and region != pool.machines.region_id:
        text = gettext("It borrows the machines of %(pool)s and is in its region.")
        raise InvalidValue(text % {"pool": pool.machines.name}, param="region")
    if pool.borrows_from_id and interruptions_per_hour is None:
        raise InvalidValue(gettext("Enter how often a borrowed machine is taken back."), param="interruptions_per_hour")
    changes: dict[str, object] = {
        "region_id": _known_region(region),
        "memory_bytes": memory_bytes,
        "is_open": is_open,
        "serves_whole_models": serves_whole_models,
    }
    changes |= _spot(interruptions_per_hour) | _policy(price_policy, firm_factor)
    mixed = PoolCapacity.objects.filter(pool=pool).exclude(kind=CapacityKind.STATIC).exclude(on_demand_nodes=None)
    has_spot_nodes = mixed.exists()
    if has_spot_nodes and not changes["is_spot"]:
        raise InvalidValue(
            gettext("Some nodes of this pool are spot: make all of them on demand first."),
            param="interruptions_per_hour",
        )
    if pool.region_id != changes["region_id"]:
        require_only_fleets(pool=pool, region=region, param="region")
    for name, value in changes.items():
        setattr(pool, name, value)
    pool.save(update_fields=list(changes))  # waits for enrolments, so that the next line finds their replicas
    pool.fleets.update(region_id=region)
    Replica.objects.filter(worker__pool=pool).update(region_id=region)
    GpuPool.objects.filter(borrows_from=pool).update(region_id=region)
    audit.record(
        organization=None, by=by, action="pool.edited", target=pool.pk, is_open=is_open, is_spot=pool.is_spot,
        region=region, price_policy=price_policy, firm_factor=str(firm_factor),
    )  # fmt: skip
    return pool


def _require_lender(pool: GpuPool, *, gpu_type: GpuType, interruptions_per_hour: float | None) -> None:
    """Raise InvalidValue unless a pool of this GPU type may borrow from the pool."""
    if pool.borrows_from_id:
        raise InvalidValue(gettext("Choose a pool that has machines of its own."), param="borrows_from")
    if pool.gpu_type_id != gpu_type.pk:
        raise InvalidValue(gettext("Choose the GPU type of the pool that it borrows from."), param="gpu_type")
    if interruptions_per_hour is None:
        raise InvalidValue(gettext("Enter how often a borrowed machine is taken back."), param="interruptions_per_hour")


def _known_region(name: str) -> str:
    """Return the name of a region. Raises InvalidValue."""
    if not Region.objects.filter(pk=name).exists():
        raise InvalidValue(gettext("There is no region named %(name)s.") % {"name": repr(name)}, param="region")
    return name


def _policy(price_policy: str, firm_factor: Decimal) -> dict[str, object]:
    """Return the fields of a pool's price policy. Raises InvalidValue."""
    if price_policy not in PricePolicy.values:
        raise InvalidValue(gettext("Choose firm or metered."), param="price_policy")
    if not (firm_factor.is_finite() and 1 <= firm_factor <= MAX_FIRM_FACTOR):
        raise InvalidValue(
            gettext("Set a factor from 1 to %(max_firm_factor)s.") % {"max_firm_factor": MAX_FIRM_FACTOR},
            param="firm_factor",
        )
    return {"price_policy": price_policy, "firm_factor": firm_factor}


def _spot(interruptions_per_hour: float | None) -> dict[str, object]:
    """Return the fields of a spot pool, or for None those of a pool that is not spot."""
    if interruptions_per_hour is None:
        return {"is_spot": False, "interruptions_per_hour": 0.0}
    if not 0 < interruptions_per_hour <= _MAX_INTERRUPTIONS_PER_HOUR:
        raise InvalidValue(
            gettext(
                "Expect more than 0 and at most %(max_interruptions_per_hour)s interruptions an hour of a spot machine."
            )
            % {"max_interruptions_per_hour": f"{_MAX_INTERRUPTIONS_PER_HOUR:g}"},
            param="interruptions_per_hour",
        )
    return {"is_spot": True, "interruptions_per_hour": interruptions_per_hour}


@transaction.atomic
def issue_worker_token(
    *,
    pool: GpuPool,
    kind: str,
    base_model: BaseModel | None,
    whole_model: AdapterVersion | None = None,
    life: datetime.timedelta = _TOKEN_LIFE,
    by: str,
) -> str:
    """Return a token that admits one worker (or, with a model, one replica of it), once, within its `life`.

    Raises InvalidValue, also for a whole model if the pool does not serve whole models, and InvalidState for a pool
    that borrows its machines.
    """
    if pool.borrows_from_id:
        text = gettext("This pool has no machines of its own. Add the machine to %(pool)s.")
        raise InvalidState(text % {"pool": pool.machines.name})
    if whole_model is not None:
        base_model = _base_of(whole_model, pool=pool, base_model=base_model)
    if (kind == WorkerKind.REPLICA) != (base_model is not None):
        raise InvalidValue(gettext("A replica serves one base model; a trainer serves none."), param="base_model")
    token = f"annt_{secrets.token_urlsafe(32)}"
    issued = WorkerToken.objects.create(
        pool=pool,
        kind=kind,
        base_model=base_model,
        whole_model=whole_model,
        token_sha256=sha256_hex(token),
        created_by=by,
        expires_at=db_now() + life,
    )
    audit.record(organization=None, by=by, action="worker_token.issued", target=issued.pk, pool=pool.name, kind=kind)
    return token


def _base_of(version: AdapterVersion, *, pool: GpuPool, base_model: BaseModel | None) -> BaseModel:
    """Return the base of a version that may have its own replica in the pool. Raises InvalidValue."""
    base_of_version: BaseModel = version.adapter.base_model
    if base_model not in (None, base_of_version):
        raise InvalidValue(gettext("This model was made from another base model."), param="base_model")
    if not pool.serves_whole_models:
        raise InvalidValue(
            gettext("This pool does not serve whole models: allow it in its settings."), param="whole_model"
        )
    if not is_allowed(regions := regions_of(organization=version.organization_id), pool.region_id):
        text = gettext("This model's organization is limited to %(regions)s, and the pool is in %(region)s.")
        raise InvalidValue(text % {"regions": ", ".join(regions or ()), "region": pool.region_id}, param="whole_model")
    if version.status != AdapterVersionStatus.FILES_ONLY or version.deleted_at is not None:
        raise InvalidValue(
            gettext("This model is an adapter: any replica of its base model serves it beside others."),
            param="whole_model",
        )
    try:
        find_whole_model(version=version)
    except NotFound as missing:
        raise InvalidValue(gettext("There is no merged model of this version."), param="whole_model") from missing
    return base_of_version


@transaction.atomic
def enroll(*, request: EnrollRequest) -> tuple[Worker, WorkerToken, EnrollResponse]:
    """Redeem a one-time token for a credential.

    The pool stays locked, so that it keeps its region until a replica is registered in the transaction. Raises
    InvalidWorkerCredential if the token was used, has expired, or is of another kind.
    """
    now = db_now()
    locked = WorkerToken.objects.select_for_update(of=("self", "pool"), no_key=True)
    tokens = locked.select_related("pool", "base_model", "whole_model")
    token = tokens.filter(token_sha256=sha256_hex(request.token), used_at=None, expires_at__gt=now).first()
    if token is None or token.kind != request.kind:
        raise InvalidWorkerCredential(
            gettext("This token was used, has expired, or is for another kind of worker."), param="token"
        )
    token.used_at = now
    token.save(update_fields=["used_at"])
    credential = f"annw_{secrets.token_urlsafe(32)}"
    worker = Worker.objects.create(
        pool=token.pool,
        kind=token.kind,
        hostname=request.hostname[:120],
        credential_sha256=sha256_hex(credential),
        gpus=[{"key": gpu.key, "name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in request.gpus],
        software=dict(request.software),
        memory_bytes=request.memory_bytes,
        last_seen_at=now,
    )
    CapacityNode.objects.filter(token=token).update(worker=worker)
    audit.record(organization=None, by=worker.pk, action="worker.enrolled", target=worker.pk, pool=token.pool.name)
    return worker, token, EnrollResponse(worker_id=worker.pk, credential=credential, pool=token.pool.name)


def authenticate(*, credential: str) -> Worker:
    """Return the worker with this credential. Raises InvalidWorkerCredential."""
    worker = (
        Worker.objects.select_related("pool").filter(credential_sha256=sha256_hex(credential), revoked_at=None).first()
    )
    if worker is None:
        raise InvalidWorkerCredential(gettext("This worker credential is not accepted."))
    return worker


@transaction.atomic
def cordon(*, worker: Worker, by: str) -> None:
    """Give the worker no new work; its current run continues."""
    _mark(worker, by, "worker.cordoned", cordoned_at=worker.cordoned_at or db_now())


@transaction.atomic
def uncordon(*, worker: Worker, by: str) -> None:
    _mark(worker, by, "worker.uncordoned", cordoned_at=None, drain_requested_at=None)


@transaction.atomic
def drain(*, worker: Worker, by: str) -> None:
    """Cordon the worker and ask its run to checkpoint and move to another worker; the move is not billed."""
    now = db_now()
    _mark(worker, by, "worker.drained", cordoned_at=worker.cordoned_at or now, drain_requested_at=now)


@transaction.atomic
def undrain(*, worker: Worker, by: str) -> None:
    """End a drain: the worker stays cordoned, and a run that it still has continues."""
    _mark(worker, by, "worker.undrained", drain_requested_at=None)


@transaction.atomic
def revoke(*, worker: Worker, by: str) -> None:
    """Refuse the worker's credential from now on. What is revoked already stays as it is."""
    if worker.revoked_at is None:
        _mark(worker, by, "worker.revoked", revoked_at=db_now())


def _mark(worker: Worker, by: str, action: str, **changes: datetime.datetime | None) -> None:
    for name, value in changes.items():
        setattr(worker, name, value)
    worker.save(update_fields=list(changes))
    audit.record(organization=None, by=by, action=action, target=worker.pk)


@transaction.atomic
def record_probe(
    *, worker: Worker, base_model: BaseModel | None, method: str, report: dict, shape: str = ""
) -> ThroughputProbe:
    """Store one measurement from a worker: of a base model, or of a shape with made-up weights."""
    probe = ThroughputProbe.objects.create(
        pool=worker.pool, worker=worker, base_model=base_model, shape=shape, method=method, report=report
    )
    audit.record(organization=None, by=worker.pk, action="probe.recorded", target=probe.pk, method=method)
    return probe
