"""Answers to unknown API addresses: each explains the problem and the fix."""

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from apps.core.errors import NotFound
from apps.core.http.asgi import UnknownUrl, error_response

_POSTED = ("/v1/completions", "/v1/responses", "/v1/embeddings")
# Parts of OpenAI's API that are not served here, named so that clients do not look for a typo.
_NOT_OFFERED = (
    ("/v1/agents", "Agents are"),
    ("/v1/assistants", "Assistants are"),
    ("/v1/audio", "Speech and transcription are"),
    ("/v1/chatkit", "ChatKit is"),
    ("/v1/containers", "Containers are"),
    ("/v1/content_provenance_checks", "Provenance checks are"),
    ("/v1/conversations", "Stored conversations are"),
    ("/v1/decisions", "Decisions are"),
    ("/v1/engines", "Engines are"),
    ("/v1/images", "Images are"),
    ("/v1/live", "Live sessions are"),
    ("/v1/moderations", "Moderations are"),
    ("/v1/organization", "The administration API is"),
    ("/v1/projects", "The administration API is"),
    ("/v1/realtime", "Realtime sessions are"),
    ("/v1/responses/", "Stored responses are"),
    ("/v1/safety", "The safety API is"),
    ("/v1/skills", "Skills are"),
    ("/v1/threads", "Assistants are"),
    ("/v1/vaults", "Vaults are"),
    ("/v1/vector_stores", "Vector stores are"),
    ("/v1/videos", "Videos are"),
)
_OFFERED = ("chat", "completions", "embeddings", "files", "fine_tuning", "models", "responses", "uploads",
            "webhook_endpoints", "webhook_event_types")  # fmt: skip
# First parts of addresses requested by a client whose base URL lacks /v1. /organization and /projects are pages
# as well, and so is /batches.
WITHOUT_V1 = sorted({*_OFFERED, *(prefix.split("/")[2] for prefix, _ in _NOT_OFFERED)} - {"organization", "projects"})


class NotOffered(NotFound):
    code = "not_offered"


@csrf_exempt
def unknown_url(request: HttpRequest, rest: str = "") -> HttpResponse:
    """Answer every unknown address of the API, in debug mode too."""
    address = request.path.rstrip("/")
    name = next((name for prefix, name in _NOT_OFFERED if address.startswith(prefix)), None)
    if name:
        return error_response(NotOffered(f"{name} not offered by Anneal: {request.method} {request.path}."))
    text = f"Unknown request URL: {request.method} {request.path}. {_hint(request.path)}"
    return error_response(UnknownUrl(text))


def _hint(path: str) -> str:
    if path.startswith("/v1/v1/"):
        return "The base URL of your client has /v1 twice: remove one."
    if path != "/v1/" and path.endswith("/"):
        return f"Addresses have no trailing slash: try {path.rstrip('/')}."
    if not path.startswith(("/v1/", "/api/")):
        return f"Set the base URL of your client to {settings.PUBLIC_URL}/v1."
    return "Send it with POST." if path in _POSTED else "Use one of those that GET /api/v1/schema names."
