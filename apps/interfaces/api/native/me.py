"""The organization and permissions of a key."""

from typing import Literal, TypedDict

from rest_framework.request import Request

from apps.accounts.models import Organization
from apps.accounts.roles import Permission
from apps.interfaces.api.requests.times import unix_seconds
from apps.interfaces.api.views import ApiView


class OrganizationObject(TypedDict):
    """`regions` are those that its files, jobs, models and requests stay in; null if it may use all."""

    id: str
    name: str
    slug: str
    regions: list[str] | None


class KeyObject(TypedDict):
    """`project` is the one of all that is created with the key."""

    id: str
    project: str
    scopes: list[str]
    expires_at: int | None


class MeObject(TypedDict):
    object: Literal["me"]
    organization: OrganizationObject
    key: KeyObject


class MeView(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request) -> MeObject:
        """Return the organization, the key and its scopes."""
        identity = self.identity
        return {
            "object": "me",
            "organization": organization_object(self.organization),
            "key": {
                "id": identity.key_id,
                "project": identity.project_id,
                "scopes": sorted(identity.scopes),
                "expires_at": unix_seconds(identity.expires_at),
            },
        }


def organization_object(organization: Organization) -> OrganizationObject:
    return {
        "id": organization.pk,
        "name": organization.name,
        "slug": organization.slug,
        "regions": organization.regions,
    }
