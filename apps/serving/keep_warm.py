"""Paid keep-warm: an adapter keeps its place regardless of demand, and pays for the time it is loaded."""

import datetime
import logging

from django.db import transaction
from django.db.models import Exists, Min, OuterRef, Q, QuerySet
from django.utils.translation import gettext

from apps.accounts.members.projects import require_work_in
from apps.accounts.models import Organization
from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.models import AdapterVersion
from apps.billing.queries import get_balance
from apps.billing.tenant_batches import for_each
from apps.billing.usage.metering import record_quantity
from apps.catalog.models import BaseModel, PriceRule
from apps.catalog.queries import active_price, list_all_active_prices, warm_sku
from apps.core import audit
from apps.core.database.tenancy import system
from apps.core.errors import InvalidState, QuotaExceeded
from apps.serving.models import Deployment, Replica
from apps.serving.placements import lock_placements, replan
from apps.serving.ready_replicas import able_fleets, answering, ready_replicas

logger = logging.getLogger(__name__)

MAX_KEPT_SHARE = 0.5  # of a base model's places
MAX_OF_ONE_SHARE = 0.25  # of them, for one organization; one adapter always


def warm_price(*, base_model: BaseModel, organization: Organization | str) -> PriceRule | None:
    """Return the organization's price of keeping an adapter of this base model warm; None if that is not offered."""
    return active_price(sku=warm_sku(base_model), organization=organization)


@transaction.atomic
def keep_warm(*, version: AdapterVersion, by: str, now: datetime.datetime) -> Deployment:
    """Keep a served version placed permanently, for a price.

    Raises InvalidState, QuotaExceeded, and PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=version.adapter.project_id, actor=by)
    base_model = version.adapter.base_model
    price = warm_price(base_model=base_model, organization=version.organization_id)
    deployment = Deployment.objects.select_for_update().filter(adapter_version=version, removed_at=None).first()
    if price is None:
        raise InvalidState(
            gettext("No price is set for keeping adapters of %(display_name)s warm.")
            % {"display_name": base_model.display_name},
            param="model",
        )
    if deployment is None:
        raise InvalidState(gettext("This version is not served. Serve it first."), param="model")
    if version.status == AdapterVersionStatus.REFUSED:
        raise InvalidState(gettext("An engine refused this adapter. It cannot be kept warm."), param="model")
    if version.status == AdapterVersionStatus.FILES_ONLY:
        raise InvalidState(gettext("This model has its own replica, which always keeps it loaded."), param="model")
    if deployment.pinned_at is not None:
        return deployment
    if price.price_nano and get_balance(organization=version.organization_id).available_nano <= 0:
        raise QuotaExceeded(gettext("Your balance is empty. Add credit to keep it warm."))
    with system():  # all tenants share the places; only sums leave this block
        lock_placements(base_model_id=base_model.pk)  # so that two at once do not share the last place
        staying = ready_replicas().filter(base_model=base_model, whole_model=None, draining_at=None)
        places = sum(replica.room.capacity for replica in staying)
        if not places and able_fleets().filter(base_model=base_model).exists():
            places = Replica().capacity  # of the replica that starts for it
        kept = _kept().filter(adapter_version__adapter__base_model=base_model)
        count, own = kept.count(), kept.filter(organization=version.organization_id).count()
    most_of_one = max(int(MAX_OF_ONE_SHARE * places), 1)
    if own >= most_of_one:
        raise QuotaExceeded(
            gettext("Your organization keeps %(count)s of at most %(most)s adapters warm. Stop keeping one warm first.")
            % {"count": own, "most": most_of_one},
            code="no_place_left",
        )
    if count + 1 > MAX_KEPT_SHARE * places:
        raise QuotaExceeded(
            gettext("The replicas of this base model can't keep more adapters warm. Try again later."),
            code="no_place_left",
        )
    deployment.pinned_at = deployment.warm_billed_until = now
    deployment.save(update_fields=["pinned_at", "warm_billed_until"])
    audit.record(organization=version.organization_id, by=by, action="adapter.kept_warm", target=version.pk)
    with system():
        replan(base_model_id=base_model.pk, now=now)
    return deployment


@transaction.atomic
def let_cool(*, version: AdapterVersion, by: str, now: datetime.datetime) -> None:
    """Charge what is due and end keep-warm; demand decides about the version's place again.

    Raises PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=version.adapter.project_id, actor=by)
    for deployment in _kept().filter(adapter_version=version):
        _charge(deployment, now)
        Deployment.objects.filter(pk=deployment.pk).update(pinned_at=None, warm_billed_until=None)
        audit.record(organization=version.organization_id, by=by, action="adapter.let_cool", target=version.pk)


def charge_warm(*, now: datetime.datetime) -> int:
    """Charge keep-warm for the time since the last charge; return how many were charged.

    Keep-warm ends if the organization has no credit left. One that cannot be charged does not hold up the others.
    """
    kept = [(deployment.organization_id, deployment) for deployment in _kept()]

    @transaction.atomic
    def charge(row: tuple[str, Deployment]) -> int:
        organization_id, deployment = row
        _charge(deployment, now)
        if get_balance(organization=organization_id).available_nano <= 0:
            let_cool(version=deployment.adapter_version, by="system", now=now)
        return 1

    return for_each(kept, charge, name="adapters kept warm are charged", now=now)


def paying_deployments(*, base_model: BaseModel) -> QuerySet[Deployment]:
    """Return the deployments of the base model that are kept warm, can be loaded, and pay while they are loaded."""
    unloadable = (AdapterVersionStatus.REFUSED, AdapterVersionStatus.FILES_ONLY)
    kept = _kept().filter(adapter_version__adapter__base_model=base_model)
    sku = warm_sku(base_model)
    of_owner = Q(organization=None) | Q(organization=OuterRef("organization"))
    prices = list_all_active_prices(prefix=sku).filter(of_owner, sku=sku)
    return kept.exclude(adapter_version__status__in=unloadable).filter(Exists(prices))


def _kept() -> QuerySet[Deployment]:
    return Deployment.objects.filter(removed_at=None, pinned_at__isnull=False).select_related(
        "adapter_version__adapter__base_model"
    )


def _charge(deployment: Deployment, now: datetime.datetime) -> None:
    """Record the milliseconds since the last charge, or since a replica with the version is ready, if one is."""
    version = deployment.adapter_version
    since = deployment.warm_billed_until or now
    if now <= since:
        return
    price = warm_price(base_model=version.adapter.base_model, organization=version.organization_id)
    ready_at = answering().filter(adapter_version=version).aggregate(at=Min("replica__readiness_changed_at"))["at"]
    milliseconds = int((now - max(since, ready_at)).total_seconds() * 1000) if ready_at else 0
    changed = Deployment.objects.filter(pk=deployment.pk, warm_billed_until=since).update(warm_billed_until=now)
    if changed and milliseconds > 0 and price is not None:
        record_quantity(
            organization_id=version.organization_id,
            price=price,
            subject=version.model_name,
            adapter_version_id=version.pk,
            day=now.astimezone(datetime.UTC).date(),
            quantity=milliseconds,
        )
