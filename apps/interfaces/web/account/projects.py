"""Projects: list, create, and choose the current one. The page of each shows its members and what it may cost."""

from collections.abc import Sequence

from django import forms
from django.contrib import messages
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts.members import projects
from apps.accounts.models import Organization, Project, ProjectRole
from apps.accounts.queries import list_keys, names_of_memberships
from apps.accounts.roles import Permission, has_permission
from apps.billing.budgets import get_states, list_budgets, spent_by_project
from apps.billing.models import BudgetScope
from apps.catalog.queries import list_base_models
from apps.contracts.hyperparameters import Method
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.finetuning.jobs.project_settings import change_project_settings
from apps.finetuning.queries import list_jobs, names_of_pools
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view, require
from apps.interfaces.web.shell.current_project import choose_project, find_current_project

_METHODS = ((Method.LORA.value, "LoRA"), (Method.QLORA.value, "QLoRA"), (Method.FULL.value, later("Full fine-tuning")))


class ProjectForm(forms.Form):
    name = forms.CharField(max_length=80, label=later("Name"))
    is_private = forms.BooleanField(
        required=False,
        label=later("Private"),
        help_text=later(
            "Only its members and the owners see it, and the files, models, fine-tunes and API keys in it."
        ),
    )


class ProjectSettingsForm(ProjectForm):
    default_model = forms.ChoiceField(
        required=False, label=later("Base model"), help_text=later("Offered first for a new fine-tune.")
    )
    default_method = forms.ChoiceField(
        required=False,
        label=later("Method"),
        choices=[("", "–"), *_METHODS],
        help_text=later("The default, if the model supports it."),
    )
    default_pool = forms.ChoiceField(
        required=False, label=later("Pool"), help_text=later("The default, if it can run the job.")
    )
    default_suffix = forms.CharField(
        required=False, max_length=64, label=later("Model name"), help_text=later("Part of the names of new models.")
    )

    def __init__(
        self,
        data: QueryDict | None = None,
        *,
        project: Project,
        organization: Organization,
        with_privacy: bool,
    ) -> None:
        """Create the form. `with_privacy` keeps the field that decides who sees the project."""
        super().__init__(data, initial={name: getattr(project, name) for name in self.base_fields})
        if not with_privacy:
            del self.fields["is_private"]
        models = {each.name: each.display_name for each in list_base_models(only_installed=True)}
        if project.default_model:
            models.setdefault(project.default_model, project.default_model)  # it may not be installed any more
        self.fields["default_model"].choices = [("", "–"), *models.items()]  # type: ignore[attr-defined]
        pools = sorted({*names_of_pools(organization=organization), project.default_pool} - {""})
        self.fields["default_pool"].choices = [("", "–"), *((each, each) for each in pools)]  # type: ignore[attr-defined]


class ProjectMemberForm(forms.Form):
    member = forms.ChoiceField(label=later("Member"))
    role = forms.ChoiceField(label=later("Role"), choices=[(each.value, later(each.label)) for each in ProjectRole])

    def __init__(self, data: QueryDict | None = None, *, organization: Organization) -> None:
        super().__init__(data)
        self.fields["member"].choices = list(names_of_memberships(organization=organization).items())  # type: ignore[attr-defined]


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    """List projects. A POST creates one."""
    form = ProjectForm(request.POST or None)
    if request.method == "POST":
        require(request.membership, Permission.MEMBER_MANAGE)
        if form.is_valid():
            with domain_errors_on(form):
                project = projects.create_project(
                    organization=request.organization, by=request.membership.user, now=db_now(), **form.cleaned_data
                )
                messages.success(request, gettext("%(name)s is created.") % {"name": project.name})
                return redirect("web:project_detail", project_id=project.pk)
    context = {
        "projects": projects.list_projects(organization=request.organization),
        "current": find_current_project(request),
        "form": form,
        "may_manage": has_permission(request.membership.role, Permission.MEMBER_MANAGE),
    }
    return render(
        request, "account/organization/projects.html", context, status=422 if request.method == "POST" else 200
    )


@require_POST
@organization_view(Permission.VIEW, is_of_any_project=True)
def choose(request: OrganizationRequest) -> HttpResponse:
    """Work in a project from now on, or in all of them."""
    chosen = request.POST.get("project", "")
    project = projects.get_project(organization=request.organization, id=chosen) if chosen else None
    choose_project(request, project)
    text = gettext("You now work in %(name)s.") if project else gettext("You now see all projects.")
    messages.success(request, text % {"name": project})
    return redirect("web:project_list")


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def detail(request: OrganizationRequest, project_id: str) -> HttpResponse:
    """Show a project. A POST changes its settings."""
    project = projects.get_project(organization=request.organization, id=project_id)
    form = ProjectSettingsForm(
        request.POST if request.method == "POST" else None,
        project=project,
        organization=request.organization,
        with_privacy=has_permission(request.membership.role, Permission.MEMBER_MANAGE),
    )
    if request.method != "POST":
        return _page(request, project, form)
    projects.require_management(project_id=project_id, membership=request.membership)
    if form.is_valid():
        with domain_errors_on(form):
            change_project_settings(
                organization=request.organization,
                id=project_id,
                change=projects.ProjectChange(**form.cleaned_data),
                by=request.membership.user,
            )
            messages.success(request, gettext("Saved."))
            return redirect("web:project_detail", project_id=project_id)
    return _page(request, project, form, status=422)


def _page(request: OrganizationRequest, project: Project, form: ProjectSettingsForm, status: int = 200) -> HttpResponse:
    organization, now = request.organization, db_now()
    budget = list_budgets(organization=organization).filter(scope=BudgetScope.PROJECT, target=project.pk).first()
    spent = spent_by_project(organization=organization, projects=[project.pk], now=now)[project.pk]
    keys = list_keys(organization=organization).filter(project=project, revoked_at=None)
    context = {
        "project": project,
        "form": form,
        "members": projects.list_project_members(project=project),
        "member_form": ProjectMemberForm(organization=organization),
        "spent_nano": spent,
        "budget": budget,
        "held_nano": get_states(organization=organization, budgets=[budget], now=now)[budget.pk][1] if budget else 0,
        "job_count": list_jobs(organization=organization).filter(project=project).count(),
        "key_count": keys.exclude(expires_at__lte=now).count(),
        "may_manage": not project.archived_at
        and projects.may_manage_project(project_id=project.pk, membership=request.membership),
        "may_archive": has_permission(request.membership.role, Permission.MEMBER_MANAGE) and not project.archived_at,
        "may_limit": has_permission(request.membership.role, Permission.ORGANIZATION_MANAGE),
    }
    return render(request, "account/organization/project.html", context, status=status)


@require_POST
@organization_view(Permission.VIEW, is_sensitive=True)
def set_member(request: OrganizationRequest, project_id: str) -> HttpResponse:
    """Give a member a role in the project. The project's admins may do this too."""
    try:
        member = projects.set_project_member(
            organization=request.organization,
            project_id=project_id,
            membership_id=request.POST.get("member", ""),
            role=request.POST.get("role", ""),
            by=request.membership.user,
            now=db_now(),
        )
    except (InvalidState, InvalidValue) as error:
        messages.error(request, error.message)
    else:
        text = gettext("%(name)s is now a %(role)s of the project.")
        messages.success(request, text % {"name": member.membership.user, "role": gettext(member.role)})
    return redirect("web:project_detail", project_id=project_id)


@require_POST
@organization_view(Permission.VIEW, is_sensitive=True)
def remove_member(request: OrganizationRequest, project_id: str, member_id: str) -> HttpResponse:
    """End a member's role in the project. The project's admins may do this too."""
    projects.remove_project_member(
        organization=request.organization, project_id=project_id, member_id=member_id, by=request.membership.user
    )
    messages.success(request, gettext("Removed from the project."))
    return redirect("web:project_detail", project_id=project_id)


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.MEMBER_MANAGE, is_sensitive=True)
def archive(request: OrganizationRequest) -> HttpResponse:
    return confirm(request, _ARCHIVE)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    found = projects.list_projects(organization=request.organization).filter(pk__in=ids)
    effect = gettext("Its API keys stop working at once. Its fine-tunes stay.")
    return [AffectedRow(each.pk, each.name, effect) for each in found]


def _archive(request: OrganizationRequest, project_id: str) -> None:
    projects.archive_project(organization=request.organization, id=project_id, by=request.membership.user, now=db_now())


_ARCHIVE = ConfirmedAction[OrganizationRequest](
    parameter="project",
    verb=later("Archive"),
    nouns=(later("project"), later("projects")),
    warning=later("Revoked keys never work again, and nothing new is created in an archived project."),
    done=later("Archived"),
    list_url_name="web:project_list",
    list_title=later("Projects"),
    find=_find,
    act=_archive,
)
