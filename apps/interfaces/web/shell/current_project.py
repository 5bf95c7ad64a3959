"""The project that a person works in: chosen on the page of projects, and kept in the session."""

from apps.accounts.members.projects import list_projects
from apps.accounts.models import Project
from apps.interfaces.web.shell.access import OrganizationRequest

_SESSION_PROJECT = "project_id"


def find_current_project(request: OrganizationRequest) -> Project | None:
    """Return the chosen project; None if none is, or if it is archived or no longer for the person to see."""
    chosen = request.session.get(_SESSION_PROJECT, "")
    return list_projects(organization=request.organization).filter(pk=chosen).first() if chosen else None


def choose_project(request: OrganizationRequest, project: Project | None) -> None:
    """Work in this project from now on; None: see all, and create in the default project."""
    request.session[_SESSION_PROJECT] = project.pk if project else ""
