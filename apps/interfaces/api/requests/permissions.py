"""Permissions of a key: the view names a scope for each method, and a method without one is closed."""

from typing import TYPE_CHECKING, cast

from rest_framework import permissions
from rest_framework.request import Request

from apps.accounts.queries import KeyIdentity
from apps.core.errors import PermissionDenied

if TYPE_CHECKING:
    from rest_framework.views import APIView  # imports this module through the settings


class HasScope(permissions.BasePermission):
    """Requires `view.required_scope[method]`. HEAD counts as GET."""

    def has_permission(self, request: Request, view: "APIView") -> bool:
        """Return whether the method is open. Raises PermissionDenied that names the missing scope."""
        identity = cast(KeyIdentity, request.auth)
        method = "GET" if request.method == "HEAD" else request.method
        scope = getattr(view, "required_scope", {}).get(method)
        if scope is None:
            return False
        if scope not in identity.scopes:
            raise PermissionDenied(
                f"This API key lacks the scope '{scope}', or its creator's role no longer holds it.",
                required_scope=str(scope),
            )
        return True
