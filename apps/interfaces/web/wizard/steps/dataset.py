"""The wizard's dataset step: the organization's files, and a validation file."""

from django.utils.translation import gettext

from apps.core.database.search import with_words
from apps.core.messages.translation import translated
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.queries import list_versions
from apps.interfaces.web.shell.access import OrganizationRequest
from apps.interfaces.web.wizard.plan import Plan, StepContext

_SHOWN = 200
_MAX_WORDS = 6


def dataset_context(request: OrganizationRequest, plan: Plan) -> StepContext:
    files = list_versions(organization=plan.organization, purpose="fine-tune").defer("errors")
    newest = list(files[:_SHOWN])
    words = request.GET.get("q", "").split()[:_MAX_WORDS]
    found = list(with_words(files, words, ("dataset__name", "filename"))[:_SHOWN]) if words else newest
    ready = [version for version in newest if version.status == DatasetVersionStatus.READY]
    chosen = plan.draft.get("dataset") or (ready[0].pk if ready else "")
    return StepContext(
        {
            "versions": found,
            "has_files": bool(newest),
            "q": request.GET.get("q", ""),
            "chosen": chosen,
            "validation_options": [
                (version.pk, f"{version.dataset.name}, {translated(f'version {version.number}')}: {version.filename}")
                for version in ready
            ],
            "needs": gettext("Needs a base model") if chosen else gettext("Needs a dataset"),
        }
    )
