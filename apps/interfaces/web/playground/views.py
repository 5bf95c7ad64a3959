"""The playground: up to four models side by side, streamed from the gateway with a member's short-lived token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from django.http import HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.translation import gettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe
from django_htmx.http import trigger_client_event

from apps.accounts.login.key_operations import issue_browser_token
from apps.accounts.models import Organization
from apps.accounts.queries import may_store
from apps.accounts.roles import Permission, has_permission
from apps.adapters.models import AdapterVersion
from apps.adapters.operations import CHECKPOINT_MARK
from apps.adapters.queries import list_versions
from apps.catalog.models import PriceRule
from apps.catalog.pricing import MILLION
from apps.catalog.queries import inference_sku, list_active_prices, list_base_models
from apps.contracts.serving import LoadState
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.core.messages.translation import later, translated
from apps.core.money import rated
from apps.datasets.queries import find_system_message
from apps.finetuning.queries import find_training_file
from apps.interfaces.web.playground.saved import PresetForm
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.code_samples import chat_samples
from apps.interfaces.web.shell.current_project import project_of_new_work
from apps.playground.conversations import get_conversation
from apps.playground.models import SavedConversation
from apps.playground.presets import get_preset, list_presets
from apps.playground.transcripts import MAX_COLUMNS, PlaySettings, Transcript
from apps.serving.aliases import list_aliases
from apps.serving.models import Alias
from apps.serving.queries import serving_states

_ADAPTERS_OFFERED = 200
_FORMATS = (("", later("Text")), ("json_object", later("JSON object")), ("json_schema", later("JSON schema")))
_NOTES: dict[str, str] = {
    LoadState.LOADED: "",
    "cold": later("cold, the first answer waits while it loads"),
    LoadState.FAILED: later("failed"),
    LoadState.REJECTED: later("refused"),
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
    version: AdapterVersion | None = None  # that answers, unless it is a base model


@require_safe
@organization_view(Permission.VIEW)
def show(request: OrganizationRequest) -> HttpResponse:
    """Show a column for each ?model=. With one or none, show an adapter (the newest by default) and its base model.

    `?preset=` sets models and settings instead, and `?conversation=` also the messages. htmx requests only the field
    with the models' training prompt.
    """
    bases, adapters = _options(request.organization)
    labels = {option.name: option.label for option in (*bases, *adapters)}
    wanted = [name for name in request.GET.getlist("model") if name in labels][:MAX_COLUMNS]
    if request.htmx:
        return _training_prompt_field(request, _training_prompt(adapters, wanted))
    opened, settings = _kept(request)
    transcript = opened.transcript if opened else Transcript()
    chosen: Sequence[str] = settings.models if settings else wanted
    if len(chosen) < (1 if settings else 2):
        chosen = _pair(bases, adapters, wanted[0] if wanted else "")
    training_prompt = "" if settings else _training_prompt(adapters, chosen)
    context = {
        "columns": [
            {"chosen": name if name in labels else "", "label": labels.get(name, name), "turns": turns or ()}
            for name, turns in zip_longest(chosen, transcript.columns[: len(chosen)])
        ],
        "conversation": opened,
        "settings": settings or PlaySettings(system=training_prompt, temperature=0, max_tokens=128),
        "formats": _FORMATS,
        "votes": (("up", gettext("Good")), ("down", gettext("Bad"))),
        "bases": bases,
        "groups": _groups(bases, adapters),
        "has_adapters": bool(adapters),
        "training_prompt": training_prompt,
        "presets": list_presets(membership=request.membership),
        "preset_form": PresetForm(auto_id="preset_%s"),
        "samples": chat_samples(model=chosen[-1] or chosen[0]),
        "may_ask": has_permission(request.membership.role, Permission.INFERENCE),
        "may_save": has_permission(request.membership.role, Permission.DATASET_WRITE),
        "may_keep": may_store(regions=request.organization.regions),
        "may_train": has_permission(request.membership.role, Permission.JOB_WRITE),
    }
    return render(request, "adapters/playground.html", context)


def _kept(request: OrganizationRequest) -> tuple[SavedConversation | None, PlaySettings | None]:
    """Return the conversation and the settings that the address names; a preset's settings come first."""
    member, asked = request.membership, request.GET
    opened = get_conversation(membership=member, id=asked["conversation"]) if asked.get("conversation") else None
    preset = get_preset(membership=member, id=asked["preset"]) if asked.get("preset") else None
    return opened, preset.settings if preset else opened.transcript.settings if opened else None


def _training_prompt_field(request: OrganizationRequest, training_prompt: str) -> HttpResponse:
    if training_prompt:
        context = {"training_prompt": training_prompt, "settings": PlaySettings(system=training_prompt)}
        return render(request, "adapters/playground.html#system", context)
    text = gettext("The training data of these models has no system message.")
    return trigger_client_event(HttpResponse(status=204), "toast", {"text": text})


@never_cache
@require_POST
@organization_view(Permission.INFERENCE)
def token(request: OrganizationRequest) -> JsonResponse:
    """Create the browser's own key: inference only, valid for minutes, metered and limited like any other."""
    now = db_now()
    try:
        project = project_of_new_work(request)
        issued = issue_browser_token(membership=request.membership, now=now, project_id=project.pk)
    except DomainError as refused:
        return JsonResponse(refused.as_openai(), status=refused.status)
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
            label=version.adapter.name
            if version.number == 1
            else f"{version.adapter.name}, {translated(version.label)}",
            note=_NOTES.get(states[version.pk].state, gettext("loading")),
            base_name=version.adapter.base_model.name,
            prices=prices[version.adapter.base_model_id],
            version=version,
        )
        for version in versions
        if states[version.pk].is_deployed and version.adapter.base_model_id in prices
    ]
    named = [
        ModelOption(
            name=alias.model_name,
            label=f"{alias.adapter.name} {alias.name}",
            note=_of_alias(alias),
            base_name=alias.adapter.base_model.name,
            prices=prices[alias.adapter.base_model_id],
            version=alias.version,
        )
        for alias in list_aliases(organization=organization)
        if alias.adapter.base_model_id in prices
    ]
    return bases, [*adapters, *named]


def _of_alias(alias: Alias) -> str:
    label = translated(alias.version.label)
    if not alias.canary_percent:
        return label
    return gettext("{label}, {percent} % canary").format(label=label, percent=alias.canary_percent)


def _million_nano(rule: PriceRule | None) -> int | None:
    return rated(quantity=MILLION, price_nano=rule.price_nano, per=rule.per) if rule else None


def _training_prompt(adapters: Iterable[ModelOption], chosen: Sequence[str]) -> str:
    """Return the system message that the first of the chosen adapters was trained with; "" without one."""
    versions = {option.name: option.version for option in adapters}
    version = next((found for name in chosen if (found := versions.get(name))), None)
    training_file = find_training_file(version=version) if version else None
    return find_system_message(version=training_file) if training_file else ""


def _groups(bases: list[ModelOption], adapters: list[ModelOption]) -> list[dict[str, object]]:
    checkpoints = [option for option in adapters if CHECKPOINT_MARK in option.name]
    groups = {
        gettext("Base models"): bases,
        gettext("Adapters"): [option for option in adapters if option not in checkpoints],
        gettext("Checkpoints"): checkpoints,
    }
    return [{"label": label, "options": options} for label, options in groups.items() if options]


def _pair(bases: list[ModelOption], adapters: list[ModelOption], wanted: str) -> tuple[str, str]:
    """Return the names in the left and the right column; "" for an empty column."""
    first_base = bases[0].name if bases else ""
    if any(option.name == wanted for option in bases):
        return wanted, next((option.name for option in adapters if option.base_name == wanted), "")
    right = next((option for option in adapters if option.name == wanted), adapters[0] if adapters else None)
    return (right.base_name, right.name) if right else (first_base, "")
