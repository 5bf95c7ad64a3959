"""The project that a person works in: chosen on the page of projects, and kept in the session."""

from typing import TypeVar

from django import forms
from django.db.models import Model, QuerySet
from django.utils.translation import gettext

from apps.accounts.members.projects import get_project, list_projects
from apps.accounts.models import Project, default_project_id
from apps.core.errors import InvalidState
from apps.interfaces.web.shell.access import SESSION_PROJECT, OrganizationRequest

Row = TypeVar("Row", bound=Model)


def find_current_project(request: OrganizationRequest) -> Project | None:
    """Return the chosen project; None if there is none, or if it is archived or hidden from the person by now."""
    chosen = request.session.get(SESSION_PROJECT, "")
    return list_projects(organization=request.organization).filter(pk=chosen).first() if chosen else None


def of_project(project: Project | None, rows: QuerySet[Row], *, field: str = "project") -> QuerySet[Row]:
    """Return the rows of the project, or all rows without one. `field` is the path from a row to its project."""
    return rows.filter(**{field: project}) if project else rows


def project_or_default(request: OrganizationRequest) -> Project:
    """Return the chosen project, or else the default project. What a form creates needs `project_of_new_work`."""
    default = default_project_id(request.organization)
    return find_current_project(request) or get_project(organization=request.organization, id=default)


def project_of_new_work(request: OrganizationRequest) -> Project:
    """Return the project of what a form creates: the chosen one, or else the default project.

    Raises InvalidState once if the chosen one was archived or hidden since the page was opened: all would see the work.
    The next form works in the default project, so call this only where the person sees the refusal.
    """
    if request.session.get(SESSION_PROJECT) and find_current_project(request) is None:
        choose_project(request, None)
        raise InvalidState(
            gettext(
                "The project of this page is archived or hidden from you now. Nothing was changed. Reload the page."
            )
        )
    return project_or_default(request)


def offer_projects(request: OrganizationRequest, field: forms.Field) -> None:
    """Let a choice field name the projects that the person sees, first that of new work."""
    projects = list_projects(organization=request.organization)
    field.choices = [(each.pk, each.name) for each in projects]  # type: ignore[attr-defined]
    chosen = find_current_project(request)
    field.initial = chosen.pk if chosen else default_project_id(request.organization)


def choose_project(request: OrganizationRequest, project: Project | None) -> None:
    """Make this the person's project. With None, the person sees all projects and creates in the default one."""
    request.session[SESSION_PROJECT] = project.pk if project else ""
