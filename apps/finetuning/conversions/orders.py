"""Conversions of finished models: another form of a version, offered at a price and ordered once.

The price follows the size of the whole model and is known before. The order holds it, and what is charged follows the
files that were made, but is never more. A conversion that makes nothing costs nothing. Until a trainer takes it, it can
be cancelled.
"""

import datetime
from dataclasses import dataclass, replace

from django.db import transaction
from django.db.models import Sum
from django.utils.translation import gettext, gettext_noop

from apps.accounts.members.projects import require_work_in
from apps.accounts.shares import share_of
from apps.adapters.models import AdapterVersion
from apps.billing.budgets import attribution_of_actor
from apps.billing.models import HoldPurpose
from apps.billing.operations import hold, settle_hold
from apps.catalog.licences import require_licence
from apps.catalog.models import PriceRule
from apps.catalog.pricing import CONVERSION_SKU
from apps.catalog.queries import ModelNotFound, active_price
from apps.contracts.hyperparameters import Method
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.transitions import try_advance
from apps.core.errors import DomainError, InvalidState, InvalidValue, NotFound, QuotaExceeded, RateLimited
from apps.core.messages.translation import translated
from apps.core.money import dollars, rated, usd_decimal
from apps.datasets.intake.versions import lock_storage
from apps.finetuning.lifecycle import CONVERSION_OPEN, CONVERSION_TRANSITIONS, ConversionStatus
from apps.finetuning.models import Conversion
from apps.finetuning.queries import find_region_obstacle, maker_of
from apps.finetuning.quotes.delivery import GGUF, MERGED_16BIT, whole_model_bytes, why_no_gguf
from apps.finetuning.usage.storage import left_bytes, left_of_member

KINDS = (MERGED_16BIT, GGUF)
LABELS = {MERGED_16BIT: gettext_noop("Merged model, 16 bits"), GGUF: gettext_noop("GGUF, 16 bits")}
MAX_OPEN, MAX_A_DAY = 5, 50  # of an organization: each occupies a trainer and room on its disk
_A_DAY = datetime.timedelta(days=1)


class PriceRaised(DomainError):
    """The price rose after the customer saw it; the message gives both."""

    code = "price_raised"


@dataclass(frozen=True)
class ConversionOffer:
    """One form of a version: what it would cost, why it cannot be ordered, and its latest order.

    `bytes` is None if the base model's dimensions are unknown; `refusal` is then set.
    """

    kind: str
    bytes: int | None
    price_nano: int
    price_rule: PriceRule | None
    refusal: InvalidState | None
    conversion: Conversion | None

    @property
    def is_open(self) -> bool:
        """Whether the form is ordered and not made yet."""
        return self.conversion is not None and self.conversion.status in CONVERSION_OPEN


def list_offers(*, version: AdapterVersion) -> list[ConversionOffer]:
    """Return every form that a version could be converted to, in a fixed order."""
    rows = Conversion.objects.for_organization(version.organization_id).filter(version=version)
    latest = {row.kind: row for row in rows.order_by("kind", "-created_at", "-pk").distinct("kind")}
    rule = active_price(sku=CONVERSION_SKU, organization=version.organization_id)
    obstacle = find_region_obstacle(organization=version.organization_id)
    elsewhere = InvalidState(obstacle, param="model", code="region_refused") if obstacle else None
    return [_offer(version, kind, rule, latest.get(kind), elsewhere) for kind in KINDS]


@transaction.atomic
def order(*, version: AdapterVersion, kind: str, shown_nano: int, by: str, now: datetime.datetime) -> Conversion:
    """Order a form of the version at the price that was shown, and hold the price; an open order is returned as it is.

    Raises InvalidValue, ModelNotFound, InvalidState, LicenceNotAccepted, PriceRaised, RateLimited, QuotaExceeded,
    InsufficientBalance, BudgetExceeded, SpendingStopped, and PermissionDenied for a viewer of its project.
    """
    require_work_in(project_id=version.adapter.project_id, actor=by)
    if kind not in KINDS:
        raise InvalidValue(gettext("Choose one of these forms: %(kinds)s.") % {"kinds": ", ".join(KINDS)}, param="kind")
    organization = version.organization
    lock_storage(organization)  # two orders could else take the same room
    rows = AdapterVersion.objects.filter(pk=version.pk, deleted_at=None).select_related("adapter__base_model")
    found = rows.select_for_update(of=("self",)).first()
    if found is None:
        raise ModelNotFound(gettext("This model was deleted already."), param="model")
    offer = next(each for each in list_offers(version=found) if each.kind == kind)
    if offer.conversion is not None and offer.is_open:
        return offer.conversion
    if offer.refusal is not None:
        raise offer.refusal
    assert offer.bytes is not None
    require_licence(organization=organization, base_model=found.adapter.base_model)
    if offer.price_nano > shown_nano:
        raise PriceRaised(
            gettext("The price is now %(price)s instead of %(shown)s. Check it, then confirm it.")
            % {"price": dollars(offer.price_nano), "shown": dollars(shown_nano)},
            param="quoted_max_usd",
            price_usd=usd_decimal(offer.price_nano),
        )
    _require_room(found, offer.bytes, now)
    conversion = Conversion(
        organization=organization, version=found, kind=kind, created_by=by, created_at=now, bytes=offer.bytes,
        price_rule=offer.price_rule, price_nano=offer.price_nano,
    )  # fmt: skip
    if offer.price_nano:
        conversion.hold_id = _hold(conversion)
    conversion.save(force_insert=True)
    audit.record(
        organization=organization, by=by, action="adapter.conversion_ordered", target=found.pk, kind=kind,
        price_nano=offer.price_nano,
    )  # fmt: skip
    return conversion


def get_conversion(*, version: AdapterVersion, id: str) -> Conversion:
    """Return one order of the version. Raises NotFound, the same for unknown and foreign ids."""
    rows = Conversion.objects.for_organization(version.organization_id)
    found = rows.filter(version=version, pk=id).first()
    if found is None:
        raise NotFound(gettext("This model has no conversion with this ID."), param="conversion_id")
    return found


@transaction.atomic
def cancel(*, conversion: Conversion, by: str) -> Conversion:
    """End an order that no trainer has taken, and return what it held. Repeating the call changes nothing.

    Raises InvalidState once a trainer makes it, or it has ended otherwise, and PermissionDenied for a viewer of the
    model's project.
    """
    require_work_in(project_id=conversion.version.adapter.project_id, actor=by)
    row = Conversion.objects.select_for_update().get(pk=conversion.pk)
    if row.status == ConversionStatus.CANCELLED:
        return row
    if not try_advance(row, to=ConversionStatus.CANCELLED, transitions=CONVERSION_TRANSITIONS, ended_at=db_now()):
        text = gettext("Only a waiting conversion can be cancelled. This one is %(status)s.")
        raise InvalidState(text % {"status": row.status}, param="conversion_id")
    if row.hold_id:
        settle_hold(hold_id=row.hold_id, capture_nano=0, by=by, reason="cancelled")
    audit.record(
        organization=row.organization_id, by=by, action="conversion.cancelled", target=row.version_id, kind=row.kind
    )
    return row


def _offer(
    version: AdapterVersion,
    kind: str,
    rule: PriceRule | None,
    latest: Conversion | None,
    elsewhere: InvalidState | None,
) -> ConversionOffer:
    size = whole_model_bytes(base_model=version.adapter.base_model)
    price_nano = rated(quantity=size, price_nano=rule.price_nano, per=rule.per) if rule and size else 0
    refusal = _why_not(version, kind, size) or elsewhere
    return ConversionOffer(
        kind=kind, bytes=size, price_nano=price_nano, price_rule=rule, refusal=refusal, conversion=latest
    )  # fmt: skip


def _why_not(version: AdapterVersion, kind: str, size: int | None) -> InvalidState | None:
    """Return why the version cannot be converted to this form; None if it can."""
    base_model = version.adapter.base_model
    if any(export["kind"] == kind for export in version.exports):
        text = gettext("This form of the model already exists: download it.")
        return InvalidState(text, param="kind", code="already_converted")
    if kind == MERGED_16BIT and version.method == Method.FULL:
        text = gettext("This model was fully trained, so its files already are the whole model.")
        return InvalidState(text, param="kind", code="already_converted")
    if not base_model.is_installed:
        text = gettext("The base model %(name)s is no longer installed here, and a conversion needs its files.")
        return InvalidState(text % {"name": base_model.name}, param="model", code="base_model_gone")
    if kind == GGUF and (reason := why_no_gguf()):
        return InvalidState(translated(reason), param="kind", code="conversion_unavailable")
    if size is None:
        text = gettext("The dimensions of the base model %(name)s are unknown, so a conversion has no price.")
        return InvalidState(text % {"name": base_model.name}, param="model", code="conversion_unavailable")
    return None


def _require_room(version: AdapterVersion, wanted_bytes: int, now: datetime.datetime) -> None:
    """Raise RateLimited or QuotaExceeded above the limits, which organizations that share have together."""
    organization = version.organization
    with share_of(organization) as organizations:
        rows = Conversion.objects.filter(organization__in=organizations)
        if rows.filter(created_at__gt=now - _A_DAY).count() >= MAX_A_DAY:
            text = gettext("An organization can order at most %(max_a_day)s conversions a day. Try again tomorrow.")
            raise RateLimited(text % {"max_a_day": MAX_A_DAY}, retry_after_seconds=3600)
        waiting = rows.filter(status__in=CONVERSION_OPEN)
        if waiting.count() >= MAX_OPEN:
            text = gettext(
                "Your organization has %(max_open)s open conversions, the most allowed. Wait until one has ended."
            )
            raise RateLimited(text % {"max_open": MAX_OPEN}, retry_after_seconds=60)
        promised = waiting.aggregate(bytes=Sum("bytes"))["bytes"] or 0
    left = left_bytes(organization=organization)
    if left is not None and wanted_bytes + promised > left:
        text = gettext(
            "The converted model needs %(wanted)s bytes of storage, and your organization has %(left)s left. Delete "
            "files or models you no longer need, or ask the operator for more."
        )
        raise QuotaExceeded(text % {"wanted": f"{wanted_bytes:,}", "left": f"{max(left - promised, 0):,}"})
    _require_room_of_maker(version, wanted_bytes)


def _require_room_of_maker(version: AdapterVersion, wanted_bytes: int) -> None:
    """Raise QuotaExceeded above the limit of the member who made the version: the form counts as stored by it."""
    organization, maker = version.organization, maker_of(version)
    own = left_of_member(organization=organization, by=maker)
    if own is None:
        return
    rows = Conversion.objects.for_organization(organization).filter(status__in=CONVERSION_OPEN)
    promised = sum(each.bytes for each in rows.select_related("version") if maker_of(each.version) == maker)
    if wanted_bytes + promised > own:
        text = gettext(
            "The converted model needs %(wanted)s bytes of storage. Of what your organization allows the member who "
            "made the model, %(left)s are left. Delete files or models of this member, or ask an owner for more."
        )
        raise QuotaExceeded(text % {"wanted": f"{wanted_bytes:,}", "left": f"{max(own - promised, 0):,}"})


def _hold(conversion: Conversion) -> str:
    """Hold the price, under the project of the model; return the hold's id."""
    whose = attribution_of_actor(organization=conversion.organization, by=conversion.created_by, labels={})
    whose = replace(whose, project_id=conversion.version.adapter.project_id)
    held = hold(
        organization=conversion.organization,
        purpose=HoldPurpose.JOB,
        source=conversion.pk,
        amount_nano=conversion.price_nano,
        by=conversion.created_by,
        idempotency_key=f"hold:{conversion.pk}",
        attribution=whose,
        price_rule=conversion.price_rule,
    )
    return held.pk
