"""Bearer keys: `Authorization: Bearer ann_live_…`, checked offline by checksum before any query."""

from rest_framework import authentication
from rest_framework.request import Request

from apps.accounts.login.bearer_keys import read_bearer, require_project_of_key, wrong_key
from apps.accounts.queries import KeyIdentity, find_key


class ApiKeyAuthentication(authentication.BaseAuthentication):
    """Sets `request.auth` to the KeyIdentity. There is no `request.user`, because programs are not people."""

    def authenticate(self, request: Request) -> tuple[None, KeyIdentity]:
        """Return None and the key's identity. Raises InvalidApiKey, and MismatchedProject for the header."""
        secret = read_bearer(request.headers.get("Authorization", ""))
        identity = find_key(secret=secret)
        if identity is None:
            raise wrong_key(secret)
        require_project_of_key(named=request.headers.get("OpenAI-Project", "").strip(), own=identity.project_id)
        return None, identity

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"
