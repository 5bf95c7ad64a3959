"""The stored part of a chat with `store: true`: its messages, tools and settings, as the customer sent them."""

import msgspec

from apps.batches.completions.records import MAX_COMPLETION_BYTES
from apps.core.errors import InvalidValue

_MAX_REQUEST_BYTES = MAX_COMPLETION_BYTES // 2  # the rest is for the answer
_MAX_USER_BYTES = 512
_KEPT = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "temperature", "top_p",
    "presence_penalty", "frequency_penalty", "seed", "stop", "max_tokens", "max_completion_tokens", "user",
)  # fmt: skip
_encoder = msgspec.json.Encoder()


class KeptRequest(msgspec.Struct, frozen=True):
    """A request to store with its answer. `content` is a JSON object."""

    content: bytes
    metadata: dict[str, str]


def kept_request(body: msgspec.Struct, *, metadata: dict[str, str] | None) -> KeptRequest:
    """Return the part of a chat's body to store. Raises InvalidValue."""
    if any("\x00" in text for pair in (metadata or {}).items() for text in pair):
        raise InvalidValue("`metadata` has a NUL character. Remove it.", param="metadata")
    user = getattr(body, "user", None)
    if user is not None and len(_encoder.encode(user)) > _MAX_USER_BYTES:
        raise InvalidValue(f"`user` has more than {_MAX_USER_BYTES} bytes. Shorten it.", param="user")
    content = _encoder.encode({name: value for name in _KEPT if (value := getattr(body, name)) is not None})
    if len(content) > _MAX_REQUEST_BYTES:
        most = f"{_MAX_REQUEST_BYTES // 1024**2} MiB"
        raise InvalidValue(f"A request above {most} cannot be stored. Send `store: false`.", param="store")
    return KeptRequest(content, metadata or {})
