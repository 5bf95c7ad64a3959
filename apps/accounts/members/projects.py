"""Projects of an organization: created, changed and archived by those who manage members, each audited.

People who manage members manage the projects that they see; owners see all. In a project, a member has their role in
the organization, or a lower one: a `viewer` of a project can only look. An `admin` of a project changes its name, its
defaults and its members, but cannot hide or archive it.
"""

import datetime
from collections.abc import Collection
from dataclasses import asdict, dataclass

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext

from apps.accounts.members.memberships import lock_members, revoke_keys
from apps.accounts.members.visibility import seeing, sight_of_key, sight_of_member, visible
from apps.accounts.models import (
    ApiKey,
    Membership,
    Organization,
    Project,
    ProjectMember,
    ProjectRole,
    User,
    default_project_id,
)
from apps.accounts.operations import clean_name
from apps.accounts.queries import project_of_actor, with_made
from apps.accounts.roles import ROLES, Permission, has_permission
from apps.core import audit
from apps.core.audit_log import count_of_hour
from apps.core.errors import InvalidState, InvalidValue, NotFound, PermissionDenied, RateLimited

MAX_PROJECTS = 200  # of an organization, without archived ones
MAX_CREATED_IN_AN_HOUR = 100  # of an organization, with those that are archived again


def list_projects(*, organization: Organization | str, with_archived: bool = False) -> QuerySet[Project]:
    """Return the projects that the request sees, by name. Archived ones are included only on request."""
    rows = visible(Project.objects.for_organization(organization), project="pk").order_by("name", "pk")
    return rows if with_archived else rows.filter(archived_at=None)


def get_project(*, organization: Organization | str, id: str) -> Project:
    """Return a project that the request sees, even if it is archived. Raises NotFound."""
    found = list_projects(organization=organization, with_archived=True).filter(pk=id).first()
    if found is None:
        raise NotFound(gettext("No such project."), param="project", code="project_not_found")
    return found


def names_of_projects(*, organization: Organization | str, ids: Collection[str]) -> dict[str, str]:
    """Return the names of these projects by id, without those that the request does not see."""
    projects = list_projects(organization=organization, with_archived=True).filter(pk__in=ids)
    return dict(projects.values_list("pk", "name"))


def list_project_members(*, project: Project) -> QuerySet[ProjectMember]:
    """Return the members who have a role in the project, oldest first."""
    return project.members.select_related("membership__user").order_by("created_at", "pk")


def require_project(*, organization: Organization | str, id: str, membership: Membership) -> Project:
    """Return the project for something new of a member.

    Raises NotFound for a project that the member does not see, InvalidState for an archived one, and PermissionDenied
    for a viewer of it.
    """
    with seeing(sight_of_member(membership)):
        project = get_project(organization=organization, id=id)
    if project.archived_at:
        raise InvalidState(
            gettext("The project %(name)s is archived. Choose another one.") % {"name": project.name}, param="project"
        )
    if not may_work_in(project_id=project.pk, membership=membership):
        raise PermissionDenied(
            gettext("The role viewer in the project %(name)s does not allow this. Choose another project.")
            % {"name": project.name},
            param="project",
        )
    return project


def may_see(*, organization: Organization | str, id: str, actor: str, membership: Membership) -> bool:
    """Return whether a member sees a project now. If `actor` is a key of theirs, the key must see it too.

    A key whose creator does not see the key's own project sees nothing.
    """
    sights, wanted = [sight_of_member(membership)], {id}
    if key := ApiKey.objects.for_organization(organization).filter(pk=actor).first():
        sights.append(sight_of_key(project_id=key.project_id, scopes=key.scopes))
        wanted.add(key.project_id)
    for sight in sights:
        with seeing(sight):
            seen = list_projects(organization=organization, with_archived=True).filter(pk__in=wanted).count()
        if seen < len(wanted):
            return False
    return True


def project_of_new(*, organization: Organization | str, by: str, wanted: str = "") -> str:
    """Return the project for new work: of a member, the wanted one or the default; of a key, its own.

    For a member, raises the errors of `require_project`.
    """
    own = project_of_actor(organization=organization, actor=by) or default_project_id(organization)
    membership = Membership.objects.for_organization(organization).filter(user=by).first()
    if membership is None:
        return own
    return require_project(organization=organization, id=wanted or own, membership=membership).pk


def may_work_in(*, project_id: str, membership: Membership) -> bool:
    """Return whether a member may change the work in the project.

    A viewer of the project may not, unless they own the organization.
    """
    if has_permission(membership.role, Permission.ORGANIZATION_MANAGE):
        return True
    viewers = ProjectMember.objects.filter(project=project_id, role=ProjectRole.VIEWER)
    return not viewers.filter(membership=membership).exists()


def require_work_in(*, project_id: str, actor: str) -> None:
    """Raise PermissionDenied if the member, or the creator of the key, who changes a job is a viewer of its project."""
    creators = ApiKey.objects.filter(pk=actor).values("created_by")
    of_actor = Q(membership__user=actor) | Q(membership__user__in=creators)
    viewers = ProjectMember.objects.filter(of_actor, project=project_id, role=ProjectRole.VIEWER)
    viewer = viewers.select_related("project", "membership").first()
    if viewer and not has_permission(viewer.membership.role, Permission.ORGANIZATION_MANAGE):
        text = gettext("The role viewer in the project %(name)s does not allow changing what is in it.")
        raise PermissionDenied(text % {"name": viewer.project.name})


def require_active(*, project_id: str) -> None:
    """Raise InvalidState for an archived project, because nothing new may begin in it."""
    archived = Project.objects.filter(pk=project_id).exclude(archived_at=None).first()
    if archived:
        raise InvalidState(gettext("The project %(name)s is archived.") % {"name": archived.name}, param="project")


def may_manage_project(*, project_id: str, membership: Membership) -> bool:
    """Return whether a member may change the project and its members."""
    return has_permission(membership.role, Permission.MEMBER_MANAGE) or is_project_admin(
        project_id=project_id, membership=membership
    )


def is_project_admin(*, project_id: str, membership: Membership) -> bool:
    """Return whether a member is an admin of the project and may create keys in the organization."""
    if not has_permission(membership.role, Permission.KEY_MANAGE):
        return False
    admins = ProjectMember.objects.filter(project=project_id, role=ProjectRole.ADMIN)
    return admins.filter(membership=membership).exists()


def require_management(*, project_id: str, membership: Membership) -> None:
    """Raise PermissionDenied for a member who may not change the project and its members."""
    if not may_manage_project(project_id=project_id, membership=membership):
        text = gettext("Your role, %(role)s, does not allow managing this project. An admin of it may.")
        raise PermissionDenied(text % {"role": gettext(membership.role)})


@transaction.atomic
def create_project(
    *, organization: Organization, name: str, is_private: bool, by: User, now: datetime.datetime
) -> Project:
    """Create a project; `by` is a member of it. Raises PermissionDenied, InvalidValue, InvalidState, RateLimited."""
    acting = _lock(organization, by)
    if Project.objects.for_organization(organization).filter(archived_at=None).count() >= MAX_PROJECTS:
        raise InvalidState(
            gettext("An organization has at most %(most)s projects. Archive one first.") % {"most": MAX_PROJECTS}
        )
    if count_of_hour(organization=organization, action="project.create") >= MAX_CREATED_IN_AN_HOUR:
        text = gettext("An organization can create at most %(most)s projects an hour. Try again later.")
        raise RateLimited(text % {"most": MAX_CREATED_IN_AN_HOUR}, retry_after_seconds=600)
    project = Project.objects.create(
        organization=organization, name=_free_name(organization, name), is_private=is_private, created_by=by.pk,
        created_at=now,
    )  # fmt: skip
    ProjectMember.objects.create(
        organization=organization, project=project, membership=acting, role=ProjectRole.MEMBER, created_at=now
    )
    audit.record(
        organization=organization, by=by.pk, action="project.create", target=project.pk, name=project.name,
        is_private=is_private,
    )  # fmt: skip
    return project


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectChange:
    """A project's name, visibility and defaults for fine-tunes. None leaves a value as it is."""

    name: str | None = None
    is_private: bool | None = None
    default_model: str | None = None
    default_pool: str | None = None
    default_method: str | None = None
    default_suffix: str | None = None


@transaction.atomic
def change_project(*, organization: Organization, id: str, change: ProjectChange, by: User) -> Project:
    """Change a project.

    Keys of members who do not see it stop working at once. An admin of the project cannot change who sees it.

    Raises NotFound, PermissionDenied, InvalidValue, InvalidState.
    """
    acting = _lock_for(organization, by, id)
    project = _open_project(organization, id)
    if change.is_private not in (None, project.is_private):
        _require_members_managed(acting)
    if change.is_private and project.is_default:
        raise InvalidState(
            gettext("The default project is open to all members. Create another project for private work."),
            param="is_private",
        )
    name = None if change.name is None else _free_name(organization, change.name, but=project)
    changes = asdict(change) | {"name": name}
    changes = {field: value for field, value in changes.items() if value not in (None, getattr(project, field))}
    before = {field: getattr(project, field) for field in changes}
    for field, value in changes.items():
        setattr(project, field, value)
    if changes:
        project.save(update_fields=list(changes))
        audit.record(
            organization=organization, by=by.pk, action="project.change", target=project.pk, before=before,
            after=changes,
        )  # fmt: skip
    return project


@transaction.atomic
def archive_project(*, organization: Organization, id: str, by: User, now: datetime.datetime) -> Project:
    """Archive a project and revoke its keys; its jobs stay. Raises NotFound, PermissionDenied, InvalidState."""
    _lock(organization, by)
    project = _open_project(organization, id)
    if project.is_default:
        raise InvalidState(gettext("The default project cannot be archived."))
    project.archived_at = now
    project.save(update_fields=["archived_at"])
    keys = ApiKey.objects.for_organization(organization).filter(project=project)
    revoked = revoke_keys(with_made(keys), now=now, by=by)
    audit.record(
        organization=organization, by=by.pk, action="project.archive", target=project.pk, name=project.name,
        keys_revoked=revoked,
    )  # fmt: skip
    return project


@transaction.atomic
def set_project_member(
    *, organization: Organization, project_id: str, membership_id: str, role: str, by: User, now: datetime.datetime
) -> ProjectMember:
    """Give a member of the organization, a person or service account, a role in a project.

    It replaces their earlier role. Raises NotFound, PermissionDenied, InvalidValue, InvalidState.
    """
    acting = _lock_for(organization, by, project_id)
    project = _open_project(organization, project_id)
    if role not in ProjectRole.values:
        raise InvalidValue(
            gettext("The role in a project must be one of %(roles)s.") % {"roles": ", ".join(ProjectRole.values)},
            param="role",
        )
    membership = Membership.objects.for_organization(organization).filter(pk=membership_id).first()
    if membership is None:
        raise NotFound(gettext("No such member."), param="member")
    if role == ProjectRole.VIEWER and not ROLES[membership.role].permissions <= ROLES[acting.role].permissions:
        text = gettext("Your role, %(role)s, does not allow making a member with the role %(theirs)s a viewer.")
        raise PermissionDenied(text % {"role": gettext(acting.role), "theirs": gettext(membership.role)}, param="role")
    member, _ = ProjectMember.objects.update_or_create(
        organization=organization,
        project=project,
        membership=membership,
        defaults={"role": role},
        create_defaults={"role": role, "created_at": now},
    )
    audit.record(
        organization=organization, by=by.pk, action="project.member_set", target=project.pk,
        member=membership.user_id, role=role,
    )  # fmt: skip
    return member


@transaction.atomic
def remove_project_member(*, organization: Organization, project_id: str, member_id: str, by: User) -> None:
    """End a member's role in a project. They then see the same as others without a role in it.

    Raises NotFound, PermissionDenied, InvalidState.
    """
    _lock_for(organization, by, project_id)
    project = _open_project(organization, project_id)
    member = project.members.select_related("membership").filter(pk=member_id).first()
    if member is None:
        raise NotFound(gettext("No such member."), param="member")
    member.delete()
    audit.record(
        organization=organization, by=by.pk, action="project.member_remove", target=project.pk,
        member=member.membership.user_id,
    )  # fmt: skip


def _lock(organization: Organization, by: User) -> Membership:
    """Lock the members, so that no key is made for a project that is being archived; return the actor's membership."""
    acting = lock_members(organization, by)
    _require_members_managed(acting)
    return acting


def _lock_for(organization: Organization, by: User, project_id: str) -> Membership:
    """Lock the members for a change of one project, which its admins may make too; return the actor's membership."""
    acting = lock_members(organization, by)
    require_management(project_id=project_id, membership=acting)
    return acting


def _require_members_managed(acting: Membership) -> None:
    if not has_permission(acting.role, Permission.MEMBER_MANAGE):
        raise PermissionDenied(
            gettext("Your role, %(role)s, does not allow managing projects.") % {"role": acting.role}
        )


def _open_project(organization: Organization, id: str) -> Project:
    project = get_project(organization=organization, id=id)
    if project.archived_at:
        raise InvalidState(gettext("The project %(name)s is archived.") % {"name": project.name})
    return project


def _free_name(organization: Organization, name: str, *, but: Project | None = None) -> str:
    name = clean_name(name)
    same = Project.objects.for_organization(organization).filter(name__iexact=name, archived_at=None)
    if same.exclude(pk=but.pk if but else "").exists():
        raise InvalidState(
            gettext("A project named %(name)s already exists. Choose another name.") % {"name": name}, param="name"
        )
    return name


def project_of_new_key(
    *, organization: Organization, id: str, membership: Membership, own: str, scopes: frozenset[str] | None
) -> Project:
    """Return the project of a new key.

    `own` is the project of the calling key, `scopes` its scopes; None if a person calls. Raises PermissionDenied if the
    calling key does not manage members and names another project, and the errors of `require_project`.
    """
    wanted = id or own or default_project_id(organization)
    if scopes is not None and wanted != own and Permission.MEMBER_MANAGE not in scopes:
        raise PermissionDenied(
            gettext("Keys that this API key creates are in its own project. Leave the project out."), param="project"
        )
    get_project(organization=organization, id=wanted)  # as the key that asks sees it
    return require_project(organization=organization, id=wanted, membership=membership)
