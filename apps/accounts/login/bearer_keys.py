"""API keys in an Authorization header. Every key that does not work gets the same answer, without a reason.

OpenAI's clients can also name a project in the header OpenAI-Project. It must be the key's project.
"""

from apps.core.errors import InvalidApiKey, MismatchedProject

_SHOWN_LENGTH = 13


def read_bearer(authorization: str) -> str:
    """Return the key of the header `Authorization: Bearer …`. Raises InvalidApiKey if it has none."""
    scheme, _, secret = authorization.partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise InvalidApiKey(
            "You didn't provide an API key. Send it in an Authorization header using Bearer auth: "
            "'Authorization: Bearer ann_live_…'. Create one on the page API keys."
        )
    return secret


def wrong_key(secret: str) -> InvalidApiKey:
    """Return the refusal of a key. It shows enough of the key to recognize it, but too little to use it."""
    shown = secret[:_SHOWN_LENGTH] + "…" if secret.isprintable() else "…"
    return InvalidApiKey(
        f"Incorrect API key provided: {shown}. It is malformed, unknown, revoked or expired; see the page API keys."
    )


def require_project_of_key(*, named: str, own: str) -> None:
    """Raise MismatchedProject if the header OpenAI-Project, `named`, is sent and is not the key's `own` project."""
    if named and named != own:
        raise MismatchedProject(
            f"OpenAI-Project header should match project for API key. The key belongs to {own}: send that, or a key of "
            "the other project. The page Projects shows the ids."
        )
