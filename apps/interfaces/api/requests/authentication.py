"""Bearer keys: `Authorization: Bearer ann_live_…`, checked offline by checksum before any query."""

from rest_framework import authentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from apps.accounts.queries import KeyIdentity, find_key

MISSING = (
    "You didn't provide an API key. Send it in an Authorization header using Bearer auth: "
    "'Authorization: Bearer ann_live_…'. Create one on the page API keys."
)
WRONG = "Incorrect API key provided: {shown}. It is malformed, unknown, revoked or expired; see the page API keys."
_SHOWN_LENGTH = 13


class ApiKeyAuthentication(authentication.BaseAuthentication):
    """Sets `request.auth` to the KeyIdentity. There is no `request.user`, because programs are not people."""

    def authenticate(self, request: Request) -> tuple[None, KeyIdentity]:
        """Return None and the key's identity.

        Raises AuthenticationFailed, with the same answer for every reason why a key does not work.
        """
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret:
            raise AuthenticationFailed(MISSING)
        identity = find_key(secret=secret)
        if identity is None:
            raise AuthenticationFailed(WRONG.format(shown=_shown(secret)))
        return None, identity

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


def _shown(secret: str) -> str:
    """Return enough of a key to recognize it but too little to use it."""
    return secret[:_SHOWN_LENGTH] + "…" if secret.isprintable() else "…"
