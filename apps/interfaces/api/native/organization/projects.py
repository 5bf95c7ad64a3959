"""Projects, who works in them, and what they cost this month."""

from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.members import projects
from apps.accounts.models import Project, ProjectMember
from apps.accounts.queries import find_membership
from apps.accounts.roles import Permission
from apps.billing.budgets import spent_by_project
from apps.core.database.clock import db_now
from apps.core.money import usd_decimal
from apps.finetuning.jobs.project_settings import change_project_settings
from apps.interfaces.api.requests.pagination import ListObject, PageQuery, SearchQuery, page, with_words_of
from apps.interfaces.api.requests.times import unix_seconds
from apps.interfaces.api.views import ApiView

_OLDEST_FIRST = ("created_at", "id")
Name = Annotated[str, Meta(min_length=1, max_length=80)]


class CreateProject(msgspec.Struct, forbid_unknown_fields=True):
    """With `is_private`, only members of the project and owners of the organization see what is in it."""

    name: Name
    is_private: bool = False


class ChangeProject(msgspec.Struct, forbid_unknown_fields=True):
    """What is left out stays. An empty default is none."""

    name: Name | None = None
    is_private: bool | None = None
    default_model: Annotated[str, Meta(max_length=200)] | None = None
    default_pool: Annotated[str, Meta(max_length=64)] | None = None
    default_method: Literal["", "lora", "qlora", "full"] | None = None
    default_suffix: Annotated[str, Meta(max_length=64)] | None = None


class ProjectObject(TypedDict):
    """`is_default` is true for the project of all that names none.

    A new job that names no model, pool, method or suffix gets `default_model` and the others: the pool if it can run
    the job, and the method if the model has it.
    """

    object: Literal["organization.project"]
    id: str
    name: str
    status: Literal["active", "archived"]
    is_default: bool
    is_private: bool
    default_model: str | None
    default_pool: str | None
    default_method: str | None
    default_suffix: str | None
    created_at: int
    archived_at: int | None


class ProjectCost(ProjectObject):
    """`spent_usd` is what the project cost in this calendar month (UTC)."""

    spent_usd: str


class ProjectsQuery(SearchQuery):
    include_archived: bool = False


class ProjectList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.MEMBER_MANAGE}
    examples = {"POST": {"name": "Search", "is_private": False}}

    def get(self, request: Request, query: ProjectsQuery) -> ListObject[ProjectObject]:
        """List projects, oldest first: the default project first. `q` searches names."""
        rows = projects.list_projects(organization=self.organization, with_archived=query.include_archived)
        places = projects.list_projects(organization=self.organization, with_archived=True)
        found = with_words_of(query, rows, fields=("name",))
        return page(query, found, _object, order=_OLDEST_FIRST, places=places)

    def post(self, request: Request, body: CreateProject) -> ProjectObject:
        """Create a project. The creator of your key is a member of it."""
        return _object(
            projects.create_project(
                organization=self.organization,
                name=body.name,
                is_private=body.is_private,
                by=self.creator,
                now=db_now(),
            )
        )


class OneProject(ApiView):
    """Calls about one project. The key of an admin of its own project changes that one with `key.manage` as well."""

    def check_permissions(self, request: Request) -> None:
        if request.method in ("GET", "HEAD") or not self._is_of_project_admin():
            self.require_scope(request)

    def require_scope(self, request: Request) -> None:
        """Raise PermissionDenied for a key without the call's scope, also for that of an admin of the project."""
        super().check_permissions(request)

    def _is_of_project_admin(self) -> bool:
        identity = self.identity
        if Permission.KEY_MANAGE not in identity.scopes or self.kwargs["project_id"] != identity.project_id:
            return False
        membership = find_membership(organization=self.organization, user=self.creator)
        return membership is not None and projects.is_project_admin(
            project_id=identity.project_id, membership=membership
        )


class ProjectDetail(OneProject):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.MEMBER_MANAGE}
    moving = ("spent_usd",)
    examples = {"POST": {"is_private": True}}

    def get(self, request: Request, project_id: str) -> ProjectCost:
        """Return a project, and what it cost this month."""
        project = projects.get_project(organization=self.organization, id=project_id)
        spent = spent_by_project(organization=self.organization, projects=[project.pk], now=db_now())
        return {**_object(project), "spent_usd": usd_decimal(spent[project.pk])}

    def post(self, request: Request, project_id: str, body: ChangeProject) -> ProjectObject:
        """Rename a project, or say who sees it and what its fine-tunes begin with.

        Keys whose creator does not see a private project stop working at once, and work again when the creator does. An
        admin of the project does not change who sees it.
        """
        project = projects.get_project(organization=self.organization, id=project_id)
        if body.is_private not in (None, project.is_private):
            self.require_scope(request)
        return _object(
            change_project_settings(
                organization=self.organization,
                id=project_id,
                change=projects.ProjectChange(**msgspec.structs.asdict(body)),
                by=self.creator,
            )
        )


class ProjectArchive(ApiView):
    required_scope = {"POST": Permission.MEMBER_MANAGE}

    def post(self, request: Request, project_id: str) -> ProjectObject:
        """Archive a project. Its keys are revoked; its jobs and what they made stay."""
        return _object(
            projects.archive_project(organization=self.organization, id=project_id, by=self.creator, now=db_now())
        )


class SetProjectMember(msgspec.Struct, forbid_unknown_fields=True):
    """`member` is the id of a member or of a service account, such as mem_….

    A `viewer` only looks. A `member` does what the role in the organization allows. An `admin` does so too, and
    changes the project's name and defaults and who works in it.
    """

    member: Annotated[str, Meta(max_length=40)]
    role: Literal["member", "viewer", "admin"] = "member"


class ProjectMemberObject(TypedDict):
    """`user` is the person or service account, under whom costs are counted."""

    object: Literal["organization.project.member"]
    id: str
    user: str
    name: str
    role: str
    added_at: int


class DeletedProjectMember(TypedDict):
    id: str
    object: Literal["organization.project.member"]
    deleted: Literal[True]


class ProjectMembers(OneProject):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.MEMBER_MANAGE}
    examples = {"POST": {"member": "mem_01m834k536k0gf5jc32faqfm5y", "role": "viewer"}}

    def get(self, request: Request, project_id: str, query: PageQuery) -> ListObject[ProjectMemberObject]:
        """List who has a role in the project, oldest first. Others work in an open project with their own role."""
        project = projects.get_project(organization=self.organization, id=project_id)
        return page(query, projects.list_project_members(project=project), _member_object, order=_OLDEST_FIRST)

    def post(self, request: Request, project_id: str, body: SetProjectMember) -> ProjectMemberObject:
        """Give a member of the organization a role in the project, in place of the one before."""
        return _member_object(
            projects.set_project_member(
                organization=self.organization,
                project_id=project_id,
                membership_id=body.member,
                role=body.role,
                by=self.creator,
                now=db_now(),
            )
        )


class ProjectMemberDetail(OneProject):
    required_scope = {"DELETE": Permission.MEMBER_MANAGE}

    def delete(self, request: Request, project_id: str, member_id: str) -> DeletedProjectMember:
        """End a member's role in the project. Of a private project, the member's keys stop working at once."""
        projects.remove_project_member(
            organization=self.organization, project_id=project_id, member_id=member_id, by=self.creator
        )
        return {"id": member_id, "object": "organization.project.member", "deleted": True}


def _object(project: Project) -> ProjectObject:
    return {
        "object": "organization.project",
        "id": project.pk,
        "name": project.name,
        "status": "archived" if project.archived_at else "active",
        "is_default": project.is_default,
        "is_private": project.is_private,
        "default_model": project.default_model or None,
        "default_pool": project.default_pool or None,
        "default_method": project.default_method or None,
        "default_suffix": project.default_suffix or None,
        "created_at": int(project.created_at.timestamp()),
        "archived_at": unix_seconds(project.archived_at),
    }


def _member_object(member: ProjectMember) -> ProjectMemberObject:
    return {
        "object": "organization.project.member",
        "id": member.pk,
        "user": member.membership.user_id,
        "name": str(member.membership.user),
        "role": member.role,
        "added_at": int(member.created_at.timestamp()),
    }
