"""Changing the catalogue: base models in and out, prices from one moment to the next."""

import datetime
import re
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction

from apps.catalog.model_files import ModelFolder, ModelRefused, check_config, read_model_folder
from apps.catalog.models import BaseModel, PriceRule
from apps.catalog.queries import hub_token_place
from apps.contracts.chat import chat_template_sha256
from apps.core import audit
from apps.core.errors import InvalidState, InvalidValue
from apps.core.object_store import platform_key, read_chunks, store
from apps.core.sealing import seal
from apps.estimates.architectures import parameter_count

_NAME = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SKU = re.compile(r"training:[a-z0-9-]+|(?:inference:(?:input|output)|warm):[a-z0-9.-]+")
_UNITS = {"training": "gpu_ms", "inference": "tokens", "warm": "warm_ms"}
_DEMO = Path(__file__).resolve().parents[2] / "demo"
UNKNOWN_CONTEXT_TOKENS = 4096  # where no source gives a model's context: what every listed family can do


def base_model_roots() -> tuple[Path, ...]:
    """Return the folders a local base model may lie in: the configured ones and the demo's own."""
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
    config: dict[str, Any] | None = None,
    hub_token: str = "",
    licence: str = "",
    source_url: str = "",
    default_recipe: dict[str, Any] | None = None,
) -> BaseModel:
    """Add a model from a local folder, ready to train, or a hub repository at one commit, listed but not installed.

    A repository needs its `config` (config.json); its files come when it is installed from a folder. Adding a folder
    under the name of a model that is listed but not installed installs it. Raises ModelRefused, InvalidValue.
    """
    if (path is None) == (not repo):
        raise InvalidValue("Give either a local path or a hub repository.", param="path")
    row = _row_for(name, display_name)
    row.licence, row.source_url = licence or row.licence, source_url or row.source_url
    if path is not None:
        _fill_from_folder(row, read_model_folder(path, roots=base_model_roots()), default_recipe or {})
    else:
        _fill_from_repository(row, repo=repo, revision=revision, config=config, hub_token=hub_token)
    row.added_by = by
    row.save()
    audit.record(
        organization=None, by=by, action="base_model.added", target=row.pk, name=name,
        place=row.path or row.repo, revision=row.revision, is_installed=row.is_installed, at=now.isoformat(),
    )  # fmt: skip
    return row


def _row_for(name: str, display_name: str) -> BaseModel:
    if not _NAME.fullmatch(name) or len(name) > 80:
        raise InvalidValue("A model's name has lower-case letters, digits, dots and hyphens.", param="name")
    row = BaseModel.objects.select_for_update().filter(name=name).first()
    if row is None:
        return BaseModel(name=name, display_name=display_name)
    if row.is_installed or row.retired_at:
        raise InvalidValue(f"There is a base model {name!r} already; names are not used twice.", param="name")
    row.display_name = display_name
    return row


def _fill_from_folder(row: BaseModel, folder: ModelFolder, default_recipe: dict[str, Any]) -> None:
    row.path, row.config, row.is_installed = folder.path, folder.config, True
    row.parameter_count = folder.parameter_count
    row.context_length = folder.architecture.max_position_embeddings or UNKNOWN_CONTEXT_TOKENS
    row.chat_template = folder.chat_template
    row.chat_template_sha256 = chat_template_sha256(folder.chat_template)
    row.special_tokens, row.files_sha256 = folder.special_tokens, folder.files_sha256
    row.default_recipe = default_recipe
    row.tokenizer_key = platform_key("tokenizers", folder.files_sha256["tokenizer.json"], "tokenizer.json")
    with (Path(folder.path) / "tokenizer.json").open("rb") as tokenizer:
        store().put_stream(row.tokenizer_key, read_chunks(tokenizer))


def _fill_from_repository(
    row: BaseModel, *, repo: str, revision: str, config: dict[str, Any] | None, hub_token: str
) -> None:
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise InvalidValue("A repository is written owner/name, as on the hub.", param="repo")
    if not _COMMIT.fullmatch(revision):
        raise InvalidValue("Give the full 40-digit commit, so that the weights cannot change.", param="revision")
    if config is None:
        raise ModelRefused("Paste the repository's config.json: quotes are made from it.", param="config")
    architecture = check_config(config)
    row.repo, row.revision, row.config = repo, revision, config
    row.parameter_count = parameter_count(architecture)
    row.context_length = architecture.max_position_embeddings or UNKNOWN_CONTEXT_TOKENS
    row.is_gated = bool(hub_token)
    row.hub_token_sealed = seal(hub_token, place=hub_token_place(row)) if hub_token else None


@transaction.atomic
def reinstall_base_model(*, base_model: BaseModel, by: str) -> bool:
    """Take over the files of an installed model's folder where they have changed; return whether they had.

    For models still being made, such as the demo's: adapters trained on the old files no longer fit.
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
    """Offer the model no longer; what was trained on it stays. Raises InvalidState when it was retired already."""
    if not BaseModel.objects.filter(pk=base_model.pk, retired_at=None).update(retired_at=now):
        raise InvalidState(f"{base_model.name} was retired already.", param="model")
    base_model.refresh_from_db()
    audit.record(organization=None, by=by, action="base_model.retired", target=base_model.pk, name=base_model.name)


@transaction.atomic
def set_price(*, sku: str, unit: str, price_nano: int, per: int, by: str, now: datetime.datetime) -> PriceRule:
    """Set what `per` units of a SKU cost from now on; the rule before it closes and stays. Raises InvalidValue."""
    if not _SKU.fullmatch(sku):
        raise InvalidValue(
            "A SKU is training:<pool>, inference:<input or output>:<model> or warm:<model>.", param="sku"
        )
    if unit != _UNITS[sku.split(":", 1)[0]]:
        raise InvalidValue("Training is priced by gpu_ms, inference by tokens, warm by warm_ms.", param="unit")
    if price_nano < 0 or per <= 0:
        raise InvalidValue("A price is not negative and buys at least one unit.", param="price_nano")
    before = PriceRule.objects.select_for_update().filter(sku=sku, effective_to=None).first()
    if before:
        before.effective_to = now
        before.save(update_fields=["effective_to"])
    rule = PriceRule.objects.create(
        sku=sku, unit=unit, price_nano=price_nano, per=per, effective_from=now, created_by=by
    )
    audit.record(
        organization=None, by=by, action="price.set", target=rule.pk, sku=sku, price_nano=price_nano, per=per,
        before_nano=before.price_nano if before else None,
    )  # fmt: skip
    return rule
