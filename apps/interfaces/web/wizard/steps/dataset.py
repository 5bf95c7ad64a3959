"""The wizard's dataset step: the organization's files, and a validation file."""

from collections.abc import Sequence

from django.utils.translation import gettext

from apps.catalog.queries import list_base_models
from apps.core.database.search import with_words
from apps.core.messages.translation import translated
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import list_versions
from apps.interfaces.web.shell.access import OrganizationRequest
from apps.interfaces.web.shell.first_job import find_first_job
from apps.interfaces.web.wizard.plan import Plan, StepContext
from apps.interfaces.web.wizard.steps.least_price import find_least_price, usual_model

_SHOWN = 200
_MAX_WORDS = 6


def dataset_context(request: OrganizationRequest, plan: Plan) -> StepContext:
    files = list_versions(organization=plan.organization, purpose="fine-tune").defer("errors")
    newest = list(files[:_SHOWN])
    words = request.GET.get("q", "").split()[:_MAX_WORDS]
    found = list(with_words(files, words, ("dataset__name", "filename"))[:_SHOWN]) if words else newest
    ready = [version for version in newest if version.status == DatasetVersionStatus.READY]
    listed = _with_first(plan.version, found)
    version = plan.version or next(iter(ready), None)
    chosen = version.pk if version else ""
    model = plan.base_model or usual_model(plan, list_base_models(only_installed=True))[0]
    return StepContext(
        {
            "versions": listed,
            "has_matches": bool(found),
            "has_files": bool(newest),
            "q": request.GET.get("q", ""),
            "chosen": chosen,
            "validation_options": [
                (version.pk, f"{version.dataset.name}, {translated(f'version {version.number}')}: {version.filename}")
                for version in _with_first(plan.validation, ready)
            ],
            "least": find_least_price(
                plan,
                version=version,
                model=plan.draft.get("model") or (model.name if model else ""),
                title=model.display_name if model else "",
            ),
            "first_job": None if newest else find_first_job(organization=plan.organization),
            "needs": gettext("Needs a base model") if chosen else gettext("Needs a dataset"),
        }
    )


def _with_first(chosen: DatasetVersion | None, found: Sequence[DatasetVersion]) -> list[DatasetVersion]:
    """Return the files with the chosen one first: it stays chosen during a search."""
    return [*([chosen] if chosen else []), *(version for version in found if version != chosen)]
