"""Bounds of a large body, checked before it is decoded.

Decoding makes an object for each value and blocks the interpreter: 4 MiB of empty lists took 0.4 s, during which no
customer got a byte. These checks make no such objects and take up to 50 ms.
"""

import msgspec

from apps.core.errors import InvalidValue
from apps.core.http.json_bodies import decode_body

MAX_QUOTES = 131_072  # each string has two; 2,048 messages with a tool call each have 57,000
OTHER_BYTES = 256 * 1024  # of all fields but those below
MAX_PROMPT_IDS = 2**20
_PROMPTS = 8


class _LargeFields(msgspec.Struct):
    """The undecoded fields that a long prompt makes large. Other fields are skipped."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_LargeFields)
_texts = msgspec.json.Decoder(list[str])


def require_decodable(raw: bytes) -> None:
    """Raise DomainError if the body is no JSON object, or decoding it would make too many objects."""
    # A quote inside a string is always escaped. So this is at least the number of strings, names of fields included.
    if raw.count(b'"') - raw.count(b'\\"') > MAX_QUOTES:
        raise InvalidValue(
            f"The body holds more than {MAX_QUOTES // 2:,} strings. Send fewer messages or parts in one request."
        )
    fields = decode_body(raw, _decoder)
    large = sum(len(memoryview(getattr(fields, name))) for name in _LargeFields.__struct_fields__)
    if len(raw) - large > OTHER_BYTES:
        raise InvalidValue(
            f"The fields beside the messages or the prompt have more than {OTHER_BYTES // 1024} KiB together. "
            "Shorten them."
        )
    _require_prompt(bytes(fields.prompt))


def _require_prompt(prompt: bytes) -> None:
    """Raise InvalidValue for a list of more items than any model takes."""
    if not prompt.startswith(b"["):
        return
    if b'"' in prompt:
        try:
            _texts.decode(prompt)
        except msgspec.ValidationError as error:
            raise InvalidValue("`prompt` must be texts or token ids, not both.", param="prompt") from error
    elif prompt.count(b"[") > _PROMPTS + 1:
        raise InvalidValue(f"`prompt` holds more than {_PROMPTS} prompts.", param="prompt")
    elif prompt.count(b",") > MAX_PROMPT_IDS:
        raise InvalidValue(f"`prompt` holds more than {MAX_PROMPT_IDS:,} token ids.", param="prompt")
