"""The wizard's dataset step: the organization's files, and a validation file."""

from django.utils.translation import gettext

from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.queries import list_versions
from apps.interfaces.web.shell.access import OrganizationRequest
from apps.interfaces.web.wizard.plan import Plan, StepContext


def dataset_context(request: OrganizationRequest, plan: Plan) -> StepContext:
    versions = list(list_versions(organization=plan.organization, purpose="fine-tune").defer("errors")[:200])
    ready = [version for version in versions if version.status == DatasetVersionStatus.READY]
    chosen = plan.draft.get("dataset") or (ready[0].pk if ready else "")
    return StepContext(
        {
            "versions": versions,
            "chosen": chosen,
            "validation_options": [
                (version.pk, f"{version.dataset.name}, version {version.number}: {version.filename}")
                for version in ready
            ],
            "needs": gettext("Needs a base model") if chosen else gettext("Needs a dataset"),
        }
    )
