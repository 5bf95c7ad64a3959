"""The playground: up to four models side by side, streamed from the gateway with a member's short-lived token."""

from collections.abc import Iterable
from dataclasses import dataclass

from django.http import HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from apps.accounts.models import Organization
from apps.accounts.operations import issue_member_token
from apps.accounts.roles import Permission, has_permission
from apps.adapters.operations import CHECKPOINT_MARK
from apps.adapters.queries import list_versions
from apps.catalog.models import PriceRule
from apps.catalog.pricing import MILLION
from apps.catalog.queries import inference_sku, list_active_prices, list_base_models
from apps.contracts.chat import ChatRow, MessageRole
from apps.contracts.serving import LoadState
from apps.core.database.clock import db_now
from apps.core.money import rated
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.queries import read_rows
from apps.finetuning.queries import find_jobs_of_adapters
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.code_samples import chat_samples
from apps.serving.aliases import list_aliases
from apps.serving.queries import serving_states

_ADAPTERS_OFFERED = 200
_MAX_COLUMNS = 4
_NOTES: dict[str, str] = {
    LoadState.LOADED: "",
    "cold": "cold, the first answer waits while it loads",
    LoadState.FAILED: "failed",
    LoadState.REJECTED: "refused",
}


@dataclass(frozen=True, kw_only=True)
class TokenPrices:
    """Prices in nano-USD per million tokens, None without a price."""

    input_nano: int | None
    output_nano: int | None


@dataclass(frozen=True, kw_only=True)
class ModelOption:
    """A model that can be asked."""

    name: str
    label: str
    note: str = ""
    base_name: str
    prices: TokenPrices


@require_safe
@organization_view(Permission.VIEW)
def show(request: OrganizationRequest) -> HttpResponse:
    """Show a column for each ?model=. With one or none, show an adapter (the newest by default) and its base model."""
    bases, adapters = _options(request.organization)
    known = {option.name for option in (*bases, *adapters)}
    wanted = [name for name in request.GET.getlist("model") if name in known][:_MAX_COLUMNS]
    chosen = wanted if len(wanted) > 1 else _pair(bases, adapters, wanted[0] if wanted else "")
    context = {
        "columns": [{"chosen": name} for name in chosen],
        "bases": bases,
        "groups": _groups(bases, adapters),
        "has_adapters": bool(adapters),
        "system_message": _trained_system_message(request.organization, chosen),
        "samples": chat_samples(model=chosen[-1] or chosen[0]),
        "may_ask": has_permission(request.membership.role, Permission.INFERENCE),
        "may_save": has_permission(request.membership.role, Permission.DATASET_WRITE),
        "may_train": has_permission(request.membership.role, Permission.JOB_WRITE),
    }
    return render(request, "adapters/playground.html", context)


@never_cache
@require_POST
@organization_view(Permission.INFERENCE)
def token(request: OrganizationRequest) -> JsonResponse:
    """Create the browser's own key: inference only, valid for minutes, metered and limited like any other."""
    now = db_now()
    issued = issue_member_token(membership=request.membership, now=now)
    expires_at = issued.key.expires_at
    assert expires_at is not None
    return JsonResponse({"token": issued.secret, "expires_in": int((expires_at - now).total_seconds())})


def _options(organization: Organization) -> tuple[list[ModelOption], list[ModelOption]]:
    models = list(list_base_models(only_installed=True))
    rules = {rule.sku: rule for rule in list_active_prices(prefix="inference:", organization=organization)}
    prices = {
        model.pk: TokenPrices(
            input_nano=_million_nano(rules.get(inference_sku(model, direction="input"))),
            output_nano=_million_nano(rules.get(inference_sku(model, direction="output"))),
        )
        for model in models
    }
    bases = [
        ModelOption(name=model.name, label=model.display_name, base_name=model.name, prices=prices[model.pk])
        for model in models
    ]
    versions = list(list_versions(organization=organization)[:_ADAPTERS_OFFERED])
    states = serving_states(versions=versions)
    adapters = [
        ModelOption(
            name=version.model_name,
            label=version.adapter.name if version.number == 1 else f"{version.adapter.name}, {version.label}",
            note=_NOTES.get(states[version.pk].state, "loading"),
            base_name=version.adapter.base_model.name,
            prices=prices[version.adapter.base_model_id],
        )
        for version in versions
        if states[version.pk].is_deployed and version.adapter.base_model_id in prices
    ]
    named = [
        ModelOption(
            name=alias.model_name,
            label=f"{alias.adapter.name} {alias.name}",
            note=alias.version.label + (f", {alias.canary_percent} % canary" if alias.canary_percent else ""),
            base_name=alias.adapter.base_model.name,
            prices=prices[alias.adapter.base_model_id],
        )
        for alias in list_aliases(organization=organization)
        if alias.adapter.base_model_id in prices
    ]
    return bases, [*adapters, *named]


def _million_nano(rule: PriceRule | None) -> int | None:
    return rated(quantity=MILLION, price_nano=rule.price_nano, per=rule.per) if rule else None


def _trained_system_message(organization: Organization, chosen: Iterable[str]) -> str:
    """Return the system message of the first row that a chosen adapter was trained on; return "" without one."""
    version = list_versions(organization=organization).filter(model_name__in=chosen).first()
    jobs = find_jobs_of_adapters(organization=organization, versions=[version] if version else [])
    job = next(iter(jobs.values()), None)
    if job is None or job.training_file.status != DatasetVersionStatus.READY:
        return ""
    row = next((preview.row for preview in read_rows(version=job.training_file, limit=1)), None)
    first = row.messages[0] if isinstance(row, ChatRow) and row.messages else None
    return first.content if first and first.role is MessageRole.SYSTEM else ""


def _groups(bases: list[ModelOption], adapters: list[ModelOption]) -> list[dict[str, object]]:
    checkpoints = [option for option in adapters if CHECKPOINT_MARK in option.name]
    groups = {
        "Base models": bases,
        "Adapters": [option for option in adapters if option not in checkpoints],
        "Checkpoints": checkpoints,
    }
    return [{"label": label, "options": options} for label, options in groups.items() if options]


def _pair(bases: list[ModelOption], adapters: list[ModelOption], wanted: str) -> tuple[str, str]:
    """Return the names in the left and the right column; "" for an empty column."""
    first_base = bases[0].name if bases else ""
    if any(option.name == wanted for option in bases):
        return wanted, next((option.name for option in adapters if option.base_name == wanted), "")
    right = next((option for option in adapters if option.name == wanted), adapters[0] if adapters else None)
    return (right.base_name, right.name) if right else (first_base, "")
