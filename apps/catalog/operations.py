"""Operations that change the catalogue: adding and retiring base models, and setting prices."""

import datetime
import itertools
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.models import Organization, key_of
from apps.catalog.model_files import (
    ModelFolder,
    ModelRefused,
    check_config,
    read_hub_folder,
    read_model_folder,
    require_repository,
)
from apps.catalog.models import BaseModel, HubToken, PriceRequest, PriceRule
from apps.catalog.pricing import (
    CONVERSION_SKU,
    STORAGE_SKU,
    Tier,
    batch_sku,
    has_batch_price,
    reduced_nano,
    unit_of,
)
from apps.catalog.queries import hub_token_place, open_hub_token
from apps.contracts.chat import chat_template_sha256
from apps.core import audit
from apps.core.database.locks import lock
from apps.core.errors import DomainError, InvalidState, InvalidValue
from apps.core.messages import outbox
from apps.core.objects.store import platform_key, read_chunks, store
from apps.core.secrets.sealing import seal
from apps.estimates.models.architectures import parameter_count

_NAME = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")
_SKU = re.compile(
    r"training:[a-z0-9-]+|inference:(?:input|output):[a-z0-9.-]+(?::batch)?|warm:[a-z0-9.-]+|(?:storage|conversion):bytes"
)
_DEMO = Path(__file__).resolve().parents[2] / "demo"
UNKNOWN_CONTEXT_TOKENS = 4096  # for a model whose context no source gives: every listed family supports this


def base_model_roots() -> tuple[Path, ...]:
    """Return the folders that may hold a local base model: the configured ones and the demo's own."""
    return (*settings.BASE_MODEL_ROOTS, _DEMO)


@transaction.atomic
def add_base_model(
    *,
    name: str,
    display_name: str,
    by: str,
    now: datetime.datetime,
    path: Path | None = None,
    repo: str = "",
    revision: str = "",
    config: dict[str, object] | None = None,
    hub_token: str = "",
    licence: str = "",
    source_url: str = "",
    default_recipe: dict[str, object] | None = None,
    is_gated: bool = False,
) -> BaseModel:
    """Add a model.

    One from a local folder is ready to train; one from a hub repository at a commit is listed but not installed. A
    repository needs its `config` (config.json), so that it can be quoted before `install_from_hub` has read its files;
    this function requests that installation. Adding a folder under the name of a model that is only listed installs it.
    Raises ModelRefused, InvalidValue.
    """
    if (path is None) == (not repo):
        raise InvalidValue(gettext("Give either a local path or a hub repository."), param="path")
    row = _row_for(name, display_name)
    row.licence, row.source_url = licence or row.licence, source_url or row.source_url
    if path is not None:
        _fill_from_folder(row, read_model_folder(path, roots=base_model_roots()), default_recipe or {})
    else:
        _fill_from_repository(row, repo=repo, revision=revision, config=config)
        row.is_gated = is_gated or bool(hub_token)
    row.added_by = by
    row.save()
    if path is None:
        keep_hub_token(base_model=row, hub_token=hub_token)
        request_install(base_model=row, by=by, now=now)
    audit.record(
        organization=None, by=by, action="base_model.added", target=row.pk, name=name,
        place=row.path or row.repo, revision=row.revision, is_installed=row.is_installed, at=now.isoformat(),
    )  # fmt: skip
    return row


def _row_for(name: str, display_name: str) -> BaseModel:
    if not _NAME.fullmatch(name) or len(name) > 80:
        raise InvalidValue(gettext("A model's name has lower-case letters, digits, dots and hyphens."), param="name")
    row = BaseModel.objects.select_for_update().filter(name=name).first()
    if row is None:
        return BaseModel(name=name, display_name=display_name)
    if row.is_installed or row.retired_at:
        raise InvalidValue(
            gettext("A base model named %(name)s already exists, and names are never reused.") % {"name": repr(name)},
            param="name",
        )
    row.display_name = display_name
    return row


@transaction.atomic
def request_install(*, base_model: BaseModel, by: str, now: datetime.datetime) -> None:
    """Request the files of a listed model from the hub, at its commit.

    Raises InvalidState if the model is installed or retired, or names no repository and commit.
    """
    if base_model.is_installed or base_model.retired_at:
        raise InvalidState(
            gettext("%(name)s is installed or retired already.") % {"name": base_model.name}, param="model"
        )
    if not (base_model.repo and base_model.revision):
        raise InvalidState(
            gettext("%(name)s names no repository with its commit.") % {"name": base_model.name}, param="revision"
        )
    base_model.install_requested_at, base_model.install_error = now, ""
    base_model.save(update_fields=["install_requested_at", "install_error"])
    key = f"install:{base_model.pk}:{now.isoformat()}"
    outbox.publish(topic="base_model.install", key=key, payload={"base_model_id": base_model.pk})
    audit.record(organization=None, by=by, action="base_model.install_requested", target=base_model.pk)


def install_from_hub(*, base_model: BaseModel) -> None:
    """Read the model's text files from the hub and install it. A refusal is stored on its row."""
    if base_model.is_installed or base_model.retired_at:
        return
    from apps.catalog.hub import read_repository  # noqa: PLC0415 - slow to import, and seldom used

    with tempfile.TemporaryDirectory(prefix="anneal-hub-") as place:
        folder = Path(place)
        try:
            token = open_hub_token(base_model=base_model)
            found = read_repository(repo=base_model.repo, revision=base_model.revision, token=token, into=folder)
            read = read_hub_folder(folder, weights_sha256=found.weights_sha256)
        except DomainError as refused:
            BaseModel.objects.filter(pk=base_model.pk).update(install_error=refused.message[:500])
            return
        _keep_installed(base_model.pk, read, folder)


@transaction.atomic
def _keep_installed(base_model_id: str, read: ModelFolder, folder: Path) -> None:
    row = BaseModel.objects.select_for_update().get(pk=base_model_id)
    if row.is_installed or row.retired_at:
        return
    _fill_from_folder(row, read, row.default_recipe, folder=folder)
    row.install_error = ""
    row.save()
    audit.record(
        organization=None, by="system", action="base_model.installed", target=row.pk, place=row.repo,
        revision=row.revision,
    )  # fmt: skip


def _fill_from_folder(
    row: BaseModel, read: ModelFolder, default_recipe: dict[str, object], *, folder: Path | None = None
) -> None:
    """Copy the data of the folder that was read. `folder` holds the tokenizer if the model itself has no path here."""
    row.path, row.config, row.is_installed = read.path, read.config, True
    row.parameter_count = read.parameter_count
    row.context_length = read.architecture.max_position_embeddings or UNKNOWN_CONTEXT_TOKENS
    row.chat_template = read.chat_template
    row.chat_template_sha256 = chat_template_sha256(read.chat_template)
    row.special_tokens, row.files_sha256 = read.special_tokens, read.files_sha256
    row.default_recipe = default_recipe
    row.tokenizer_key = platform_key("tokenizers", read.files_sha256["tokenizer.json"], "tokenizer.json")
    with ((folder or Path(read.path)) / "tokenizer.json").open("rb") as tokenizer:
        store().put_stream(row.tokenizer_key, read_chunks(tokenizer))


def _fill_from_repository(row: BaseModel, *, repo: str, revision: str, config: dict[str, object] | None) -> None:
    require_repository(repo, revision or "none")
    if config is None:
        raise ModelRefused(gettext("Give the repository's config.json: quotes are made from it."), param="config")
    architecture = check_config(config)
    row.repo, row.revision, row.config = repo, revision, config
    row.parameter_count = parameter_count(architecture)
    row.context_length = architecture.max_position_embeddings or UNKNOWN_CONTEXT_TOKENS


def keep_hub_token(*, base_model: BaseModel, hub_token: str) -> None:
    """Seal the token of the model's repository, replacing the previous one; "" deletes it."""
    HubToken.objects.filter(base_model=base_model).delete()
    if hub_token:
        sealed = seal(hub_token, place=hub_token_place(base_model))
        HubToken.objects.create(base_model=base_model, token_sealed=sealed)


@transaction.atomic
def reinstall_base_model(*, base_model: BaseModel, by: str) -> bool:
    """Reload the files of an installed model's folder if they have changed; return whether they had.

    For models still in development, such as the demo's: adapters trained on the old files no longer fit.
    """
    folder = read_model_folder(Path(base_model.path), roots=base_model_roots())
    if folder.files_sha256 == base_model.files_sha256:
        return False
    _fill_from_folder(base_model, folder, base_model.default_recipe)
    base_model.save()
    audit.record(organization=None, by=by, action="base_model.reinstalled", target=base_model.pk)
    return True


@transaction.atomic
def retire_base_model(*, base_model: BaseModel, by: str, now: datetime.datetime) -> None:
    """Stop offering the model. Adapters trained on it stay. Raises InvalidState if it is already retired."""
    if not BaseModel.objects.filter(pk=base_model.pk, retired_at=None).update(retired_at=now):
        raise InvalidState(gettext("%(name)s was retired already.") % {"name": base_model.name}, param="model")
    base_model.refresh_from_db()
    audit.record(organization=None, by=by, action="base_model.retired", target=base_model.pk, name=base_model.name)


@transaction.atomic
def set_price(
    *,
    sku: str,
    unit: str,
    price_nano: int,
    per: int,
    by: str,
    now: datetime.datetime,
    organization: Organization | str | None = None,
    approved_by: str | None = None,
    tiers: Sequence[Tier] = (),
    effective_from: datetime.datetime | None = None,
) -> PriceRule:
    """Set the price of `per` units of a SKU, from now or `effective_from`, for all customers or one organization.

    A price for one organization, or of 0, needs a second operator (price_requests.py). The database checks this. The
    previous rule is closed and kept. A rule that begins later is kept too, and ends this one. A price of tokens also
    sets the price of the same tokens in batches, reduced by settings.BATCH_REDUCTION_PERCENT. Raises InvalidValue.
    """
    check_price(sku=sku, unit=unit, price_nano=price_nano, per=per, tiers=tiers)
    begin = effective_from or now
    if begin < now:
        raise InvalidValue(gettext("A price can't start in the past."), param="effective_from")
    rule = PriceRule(
        sku=sku,
        organization_id=key_of(organization),
        unit=unit,
        price_nano=price_nano,
        per=per,
        tiers=[{"from_units": tier.from_units, "price_nano": tier.price_nano} for tier in tiers],
        effective_from=begin,
        created_by=by,
        approved_by=approved_by,
    )
    _begin_rule(rule, by)
    if has_batch_price(sku):
        _begin_rule(_of_batches(rule), by)
    return rule


def batch_price_nano(wanted: PriceRule | PriceRequest) -> int | None:
    """Return the price of the same tokens in batches, set with this price; None if the SKU is not for tokens."""
    if not has_batch_price(wanted.sku):
        return None
    return reduced_nano(wanted.price_nano, percent_off=settings.BATCH_REDUCTION_PERCENT)


def _of_batches(rule: PriceRule) -> PriceRule:
    """Return the unsaved rule of the same tokens in batches."""
    off = settings.BATCH_REDUCTION_PERCENT
    tiers = [each | {"price_nano": reduced_nano(each["price_nano"], percent_off=off)} for each in rule.tiers]
    return PriceRule(
        sku=batch_sku(rule.sku),
        organization_id=rule.organization_id,
        unit=rule.unit,
        price_nano=reduced_nano(rule.price_nano, percent_off=off),
        per=rule.per,
        tiers=tiers,
        effective_from=rule.effective_from,
        created_by=rule.created_by,
        approved_by=rule.approved_by,
    )


def _begin_rule(rule: PriceRule, by: str) -> None:
    """Store a rule between the rules before and after it.

    Raises InvalidValue if another one begins at the same time.
    """
    sku, owner, begin = rule.sku, rule.organization_id, rule.effective_from
    lock(f"price:{sku}:{owner}")
    rules = PriceRule.objects.select_for_update().filter(sku=sku, organization_id=owner)
    before = rules.filter(effective_from__lt=begin).order_by("-effective_from").first()
    after = rules.filter(effective_from__gte=begin).order_by("effective_from").first()
    if after and after.effective_from == begin:
        text = gettext("Another price of %(sku)s already starts at that time.") % {"sku": sku}
        raise InvalidValue(text, param="effective_from")
    if before and (before.effective_to is None or before.effective_to > begin):
        before.effective_to = begin
        before.save(update_fields=["effective_to"])
    rule.effective_to = after.effective_from if after else None
    rule.save(force_insert=True)
    audit.record(
        organization=owner, by=by, action="price.set", target=rule.pk, sku=sku, price_nano=rule.price_nano,
        per=rule.per, approved_by=rule.approved_by, before_nano=before.price_nano if before else None,
        effective_from=begin.isoformat(),
    )  # fmt: skip


def check_price(*, sku: str, unit: str, price_nano: int, per: int, tiers: Sequence[Tier]) -> None:
    """Raise InvalidValue for a price that no SKU can have."""
    if not _SKU.fullmatch(sku):
        raise InvalidValue(
            gettext(
                "A SKU is training:<pool>, inference:<input or output>:<model>, the same with :batch, warm:<model>, "
                "%(storage_sku)s or %(conversion_sku)s."
            )
            % {"storage_sku": STORAGE_SKU, "conversion_sku": CONVERSION_SKU},
            param="sku",
        )
    if unit != unit_of(sku):
        raise InvalidValue(
            gettext(
                "Training is priced by gpu_ms, inference by tokens, warm by warm_ms, storage by byte_hours, "
                "conversion by bytes."
            ),
            param="unit",
        )
    if price_nano < 0 or per <= 0:
        raise InvalidValue(gettext("A price can't be negative and must cover at least one unit."), param="price_nano")
    if tiers and unit in ("gpu_ms", "bytes"):
        raise InvalidValue(
            gettext("Volume tiers are for tokens, storage and keep-warm; give the customer a price of its own."),
            param="tiers",
        )
    steps = [Tier(0, price_nano), *tiers]
    for lower, upper in itertools.pairwise(steps):
        if upper.from_units <= lower.from_units or not 0 <= upper.price_nano <= lower.price_nano:
            raise InvalidValue(gettext("Each tier must start above the previous one and cost no more."), param="tiers")
