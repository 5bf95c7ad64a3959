"""Projects of an organization: they group its keys and jobs, and limit who sees those of a private project."""

import pgtrigger
from django.db import models
from django.db.models.functions import Lower, Now
from django.utils.translation import gettext_noop

from apps.accounts.models.people import Membership, Organization, key_of
from apps.core.database.tenancy import OrganizationModel
from apps.core.ids import IdField
from apps.core.messages.key_invalidation import key_news

DEFAULT_NAME = "Default project"


def default_project_id(organization: Organization | str) -> str:
    """Return the id of the project that an organization has from its start.

    It is derived from the organization's id.
    """
    return f"proj_{key_of(organization).removeprefix('org_')}"


class ProjectRole(models.TextChoices):
    """The role of a member in a project.

    It gives at most the rights of their role in the organization; an admin also manages the project.
    """

    MEMBER = "member", gettext_noop("member")
    VIEWER = "viewer", gettext_noop("viewer")
    ADMIN = "admin", gettext_noop("admin")


class Project(OrganizationModel):
    """A part of an organization's work. It is archived, not deleted, so that its work stays."""

    id = IdField(prefix="proj")
    name = models.CharField(max_length=80)
    is_private = models.BooleanField(db_default=False, help_text="Only its members and the owners see what is in it.")
    default_model = models.CharField(
        max_length=200, blank=True, db_default="", help_text="The base model of a new job that names none."
    )
    default_pool = models.CharField(max_length=64, blank=True, db_default="", help_text="Its pool, if it can run it.")
    default_method = models.CharField(
        max_length=8, blank=True, db_default="", help_text="Its method, if the model has it."
    )
    default_suffix = models.CharField(max_length=64, blank=True, db_default="", help_text="Its suffix.")
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    archived_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                "organization", Lower("name"), name="project_name_once", condition=models.Q(archived_at=None)
            )
        ]
        triggers = [key_news("project_key_news", pgtrigger.UpdateOf("is_private"), organization="NEW.organization_id")]

    def __str__(self) -> str:
        return self.name

    @property
    def is_default(self) -> bool:
        return self.pk == default_project_id(self.organization_id)


class ProjectMember(OrganizationModel):
    """The role of a member of the organization, a person or service account, in a project."""

    id = IdField(prefix="projm")
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="members")
    membership = models.ForeignKey(Membership, on_delete=models.CASCADE, related_name="+")
    role = models.CharField(max_length=8, choices=ProjectRole)
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "membership"], name="project_member_once")]
        triggers = [
            key_news("project_member_key_news", pgtrigger.Update | pgtrigger.Delete, organization="OLD.organization_id")
        ]
