"""Opens a draft: what the person can no longer use is dropped from it, and the page says so."""

from dataclasses import replace

from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.accounts.members.projects import list_projects, may_work_in
from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization, Project
from apps.core.errors import InvalidValue, NotFound
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import UnknownFile
from apps.interfaces.web.shell.access import OrganizationRequest
from apps.interfaces.web.shell.current_project import project_of_new_work, project_or_default
from apps.interfaces.web.wizard.draft import FILE_NAMES, Draft
from apps.interfaces.web.wizard.plan import Plan


def open_plan(request: OrganizationRequest, draft: Draft, *, is_launch: bool = False) -> Plan:
    """Return the plan of the draft without deleted or hidden files, models that are gone, and a closed project.

    Raises UnknownFile for a file that was never the organization's, and at the launch as `project_of_new_work`.
    """
    project = _project_of(request, draft)
    fallback = project_of_new_work if is_launch else project_or_default
    plan = Plan(request.organization, draft, project or fallback(request))
    gone = _gone_files(plan) | _gone_model(plan)
    if draft.get("project") and project is None:
        words = gettext("You cannot create fine-tunes in that project. This one goes into %(name)s.")
        gone["project"] = words % {"name": plan.project}
    return replace(plan, draft=draft.with_changes(dict.fromkeys(gone, "")), gone=gone) if gone else plan


def _project_of(request: OrganizationRequest, draft: Draft) -> Project | None:
    """Return the project that the draft names, if the person may create in it."""
    asked = draft.get("project")
    found = list_projects(organization=request.organization).filter(pk=asked).first() if asked else None
    return found if found and may_work_in(project_id=found.pk, membership=request.membership) else None


def _gone_files(plan: Plan) -> dict[str, str]:
    """Return the files that were deleted or are hidden, by their names in the draft, each with a sentence."""
    sentences = {
        "dataset": gettext("The training file %(name)s was deleted or is hidden from you. Choose another one."),
        "validation": gettext(
            "The validation file %(name)s was deleted or is hidden from you. Choose another one, or none."
        ),
    }
    gone = {}
    for name in FILE_NAMES:
        try:
            _ = plan.version if name == "dataset" else plan.validation
        except UnknownFile:
            file_id = plan.draft.get(name)
            if not _files(plan.organization, file_id).exists():
                raise
            gone[name] = sentences[name] % {"name": _name_of_file(plan.organization, file_id)}
    return gone


def _files(organization: Organization, file_id: str) -> QuerySet[DatasetVersion]:
    return DatasetVersion.objects.for_organization(organization).filter(pk=file_id)


def _name_of_file(organization: Organization, file_id: str) -> str:
    """Return the name of a deleted file; the id of a hidden one."""
    deleted = _files(organization, file_id).filter(status=DatasetVersionStatus.DELETED)
    return visible(deleted, project="dataset__project").values_list("filename", flat=True).first() or file_id


def _gone_model(plan: Plan) -> dict[str, str]:
    try:
        _ = plan.start
    except (NotFound, InvalidValue):  # an alias stands for one model today, and for another tomorrow
        words = gettext("The model %(name)s no longer exists or is hidden from you. Choose another one.")
        return {"model": words % {"name": plan.draft.get("model")[:100]}}
    return {}
