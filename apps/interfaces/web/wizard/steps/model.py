"""The wizard's model step: base models, and earlier results that the organization can train further."""

from django.utils.translation import gettext

from apps.adapters.queries import list_versions
from apps.catalog.queries import list_base_models
from apps.contracts.hyperparameters import Method
from apps.core.messages.translation import translated
from apps.interfaces.web.shell.access import OrganizationRequest
from apps.interfaces.web.wizard.plan import Plan, StepContext
from apps.interfaces.web.wizard.steps.least_price import find_least_price, usual_model

_CONTINUED_SHOWN = 20


def model_context(request: OrganizationRequest, plan: Plan) -> StepContext:
    models = list(list_base_models())
    wanted = request.GET.get("q", "").strip().lower()
    matches = [model for model in models if wanted in f"{model.name} {model.display_name} {model.repo}".lower()]
    chosen = plan.draft.get("model")
    # The chosen one comes first and stays chosen during a search.
    found = [model for model in models if model.name == chosen]
    found += [model for model in matches if model.name != chosen]
    usable = [model for model in found if model.is_installed]
    others = [model for model in found if not model.is_installed]
    is_all = bool(wanted or not usable or "all" in request.GET or any(model.name == chosen for model in others))
    first, is_of_project = usual_model(plan, usable)
    preselected = chosen or (first.name if first else "")
    shown = plan.base_model if chosen else first
    title = shown.display_name if shown else ""
    return StepContext(
        {
            "continued": _continued(plan, chosen),
            "usable": usable,
            "has_matches": bool(matches),
            "others": [
                {"model": model, "url": plan.draft.url("method", model=model.name, pool="", cap="")}
                for model in (others if is_all else [])
            ],
            "chosen": preselected,
            "is_of_project": is_of_project and not chosen,
            "q": request.GET.get("q", ""),
            "hidden_count": 0 if is_all else len(others),
            "all_url": plan.draft.url("model") + "&all=1",
            "usable_url": plan.draft.url("model") if "all" in request.GET and usable else "",
            "least": find_least_price(plan, version=plan.version, model=preselected, title=title),
            "needs": gettext("Priced at the next step") if preselected else gettext("Needs a base model"),
        }
    )


def _continued(plan: Plan, chosen: str) -> list[dict[str, object]]:
    """Return the models that can be trained further: the newest versions, and the checkpoint that the draft names."""
    found: list[dict[str, object]] = [
        {
            "name": version.model_name,
            "title": f"{version.adapter.name}, {translated(version.label)}",
            "base": version.adapter.base_model.display_name,
            "made": version.created_at,
        }
        for version in list_versions(organization=plan.organization)[:_CONTINUED_SHOWN]
        if version.method != Method.FULL
    ]
    if plan.start and plan.start.start_from.name and all(one["name"] != chosen for one in found):
        title = gettext("Checkpoint") if plan.start.start_from.checkpoint else chosen
        found.insert(0, {"name": chosen, "title": title, "base": plan.start.base_model.display_name, "made": ""})
    return found
