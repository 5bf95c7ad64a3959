"""The organization itself: its settings, and its name."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.models import Organization
from apps.accounts.operations import rename_organization
from apps.accounts.roles import Permission
from apps.interfaces.api.native.me import OrganizationObject, organization_object
from apps.interfaces.api.views import ApiView


class RenameOrganization(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=80)]


class OrganizationSettings(OrganizationObject):
    """`requires_second_factor` is true if every member needs one to sign in."""

    object: Literal["organization"]
    requires_second_factor: bool


class OrganizationView(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.ORGANIZATION_MANAGE}
    examples = {"POST": {"name": "Acme"}}

    def get(self, request: Request) -> OrganizationSettings:
        """Return the organization and its settings. Its owners change the rule on second factors when signed in."""
        return _settings(self.organization)

    def post(self, request: Request, body: RenameOrganization) -> OrganizationSettings:
        """Rename the organization. The names of its models keep the slug."""
        rename_organization(organization=self.organization, name=body.name, by=self.creator)
        return _settings(self.organization)


def _settings(organization: Organization) -> OrganizationSettings:
    return {
        **organization_object(organization),
        "object": "organization",
        "requires_second_factor": organization.requires_second_factor,
    }
