"""Images and audio in a chat. They are allowed only if the model accepts them and their host is listed.

The engine itself fetches a URL from inside the operator's network. So only hosts that the operator listed are allowed,
over HTTPS on its usual port, and no IP addresses. The engine's content has only the fields below. The engine's own
field `uuid` of a part would reveal what another tenant has in the engine's cache.
"""

import re
from collections.abc import Collection
from typing import Literal

import msgspec

from apps.core.errors import InvalidValue, MissingParameter
from apps.interfaces.gateway.errors import UnsupportedParameter

MAX_MEDIA = 8  # in one request
MEDIA_TOKENS_ESTIMATE = 1024  # rough cost of one image, for limits per minute; billing uses the engine's count

# Only one spelling is allowed, so that the engine's parser cannot read another host from it: no user, no other port, no
# IP address (the last label begins with a letter), only printable ASCII and no backslash.
_HTTPS = re.compile(r"https://(?P<host>(?:[a-z0-9-]+\.)+[a-z][a-z0-9-]*)(?::443)?(?:[/?][!-\[\]-~]*)?", re.IGNORECASE)
_INLINE = {
    "image": re.compile(r"data:image/(?:png|jpeg|webp|gif);base64,"),
    "audio": re.compile(r"data:audio/[a-z0-9.+-]{1,32};base64,"),
}
_MAX_URL = 2048


class MediaLink(msgspec.Struct):
    """A media URL. OpenAI's `detail` of an image has no effect."""

    url: str


class Sound(msgspec.Struct):
    data: str
    format: Literal["wav", "mp3"]


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    image_url: MediaLink | None = None
    audio_url: MediaLink | None = None
    input_audio: Sound | None = None


class Medium(msgspec.Struct, frozen=True):
    """One image or sound of a request, and the name of its field.

    `url` is None for a sound, because its content is sent.
    """

    kind: str  # must be listed in a base model's `media`
    type: str
    place: str
    url: str | None
    body_bytes: int  # of its link or its content, in the request's body


def read_parts(
    parts: list[ContentPart], *, place: str, may_hold_media: bool, media: list[Medium]
) -> str | list[dict[str, object]]:
    """Return the engine's content of a message, and add all non-text parts to `media`. Raises DomainErrors.

    Parts with only text are joined, as the engine's own templates join them. So the engine never sees parts, which an
    adapter's name could capture.
    """
    texts = [part.text for part in parts if part.type == "text" and part.text is not None]
    if len(texts) == len(parts):
        return "\n".join(texts)
    read = [_read_part(part, f"{place}[{number}]", may_hold_media, media) for number, part in enumerate(parts)]
    if len(media) > MAX_MEDIA:
        raise InvalidValue(f"At most {MAX_MEDIA} images and sounds are allowed in one request.", param=place)
    return read


def _read_part(part: ContentPart, place: str, may_hold_media: bool, media: list[Medium]) -> dict[str, object]:
    if part.type == "text" and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type not in _KINDS or not may_hold_media:
        known = "`text`" if not may_hold_media else "`text`, " + ", ".join(f"`{kind}`" for kind in _KINDS)
        where = "" if may_hold_media else " outside messages of the user"
        raise InvalidValue(
            f"Content of type {part.type[:40]!r} is not supported{where}: send {known} only.", param=f"{place}.type"
        )
    given = getattr(part, part.type)
    if given is None:
        raise MissingParameter(f"`{place}.{part.type}` is required.", param=f"{place}.{part.type}")
    url = given.url if isinstance(given, MediaLink) else None
    content = given.data if isinstance(given, Sound) else given.url
    media.append(Medium(_KINDS[part.type], part.type, place, url, len(content)))
    return {"type": part.type, part.type: msgspec.to_builtins(given)}


_KINDS = {"image_url": "image", "audio_url": "audio", "input_audio": "audio"}


def require_allowed(media: Collection[Medium], *, taken: Collection[str], hosts: Collection[str]) -> None:
    """Raise UnsupportedParameter if the model does not accept such media, InvalidValue for a disallowed URL."""
    for medium in media:
        if medium.kind not in taken:
            raise UnsupportedParameter(
                f"Content of type {medium.type!r} is not supported by this model: send text parts with `text` only.",
                param=f"{medium.place}.type",
            )
        if medium.url is not None:
            _require_url(medium, medium.url, hosts)


def _require_url(medium: Medium, url: str, hosts: Collection[str]) -> None:
    param = f"{medium.place}.{medium.type}.url"
    if url.startswith("data:"):
        if _INLINE[medium.kind].match(url) is None:
            raise InvalidValue(f"`{param}` must begin like 'data:{medium.kind}/…;base64,'.", param=param)
        return
    found = _HTTPS.fullmatch(url) if len(url) <= _MAX_URL else None
    if found is None:
        raise InvalidValue(
            f"`{param}` must be an https:// URL with a host name, at most {_MAX_URL} characters, or a data: URL.",
            param=param,
        )
    if found["host"].lower() not in hosts:
        raise InvalidValue(
            f"`{param}`: this installation fetches nothing from {found['host'][:100]}. Send a data: URL instead.",
            param=param,
        )
