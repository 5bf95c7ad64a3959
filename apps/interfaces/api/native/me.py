"""The organization and permissions of a key."""

from rest_framework.request import Request
from rest_framework.response import Response

from apps.accounts.roles import Permission
from apps.interfaces.api.views import ApiView


class MeView(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request) -> Response:
        """Return the organization, the key and its scopes."""
        identity = self.identity
        return Response(
            {
                "object": "me",
                "organization": {
                    "id": self.organization.pk,
                    "name": self.organization.name,
                    "slug": self.organization.slug,
                },
                "key": {
                    "id": identity.key_id,
                    "scopes": sorted(identity.scopes),
                    "expires_at": int(identity.expires_at.timestamp()) if identity.expires_at else None,
                },
            }
        )
