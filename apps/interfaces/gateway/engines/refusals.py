"""What an engine's refusal of a request means for its client, in our own words."""

import logging
import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from apps.core.errors import DomainError, InvalidValue
from apps.interfaces.gateway.engines.chunks import EngineFault
from apps.interfaces.gateway.engines.engine_http import Broken, EngineResponse
from apps.interfaces.gateway.errors import ContextLengthExceeded, RequestFailed, UnsupportedParameter
from apps.interfaces.gateway.requests.engine_request import EngineRequest

logger = logging.getLogger(__name__)

_ERROR_BYTES = 64 * 1024
_DYING = ("cannot schedule new futures", "EngineCore encountered an issue")
_NAN = "not JSON compliant"  # from the 400 of an engine whose logits are not finite: its fault, not the request's


class TryAnother(Exception):
    """This replica cannot answer; another one might.

    `is_unreached`: it never saw the request. `is_busy`: it works but is full or lacks the adapter. `is_down`: it
    reports that it serves nothing now.
    """

    def __init__(
        self, reason: str, *, is_unreached: bool = False, is_busy: bool = False, is_down: bool = False
    ) -> None:
        super().__init__(reason)
        self.is_unreached, self.is_busy, self.is_down = is_unreached, is_busy, is_down


class _ErrorEnvelope(msgspec.Struct):
    error: EngineFault


_CONTEXT = re.compile(r"maximum context length is (\d+) tokens|max_model_len\D*(\d+)|max_total_tokens\D*(\d+)")
_COUNTED = re.compile(r"contains (at least )?(\d+) (input tokens|characters)")
# Error codes of a replica's proxy: only this request waits (_WELL), or all requests do (_DOWN).
_WELL = ("replica_busy", "model_loading", "model_not_found")
_DOWN = "replica_not_ready"
_OUTPUT_FIELDS = ("max_tokens", "max_completion_tokens")


async def read_refusal(response: EngineResponse, request: EngineRequest) -> Exception:
    """Return the error for a status other than 200."""
    try:
        raw = await response.read_all(_ERROR_BYTES)
    except Broken as error:
        return TryAnother(str(error))
    try:
        found = msgspec.json.decode(raw, type=_ErrorEnvelope).error
    except msgspec.DecodeError:
        found = EngineFault(raw[:300].decode(errors="replace"))
    return meaning_of(found, response.status, request)


def meaning_of(found: EngineFault, status: int | str | None, request: EngineRequest) -> Exception:
    """Return TryAnother, or a domain error that shows no engine internals."""
    logger.info("replica answered %s: %s", status, found.message[:500])
    if status in (400, 422) and _NAN not in found.message:
        return _bad_request(found, request)
    if status == 413:
        text = "The request has too many bytes for this model. Send fewer messages, or smaller images."
        return ContextLengthExceeded(text, param=request.prompt_param)
    if status == 500 and not any(text in found.message for text in _DYING):
        return RequestFailed()
    return TryAnother(
        f"{status}: {found.message[:200]}",
        is_busy=status in (404, 503) and found.code in _WELL,
        is_down=status == 503 and found.code == _DOWN,
    )


_PIXELS = re.compile(r"exceed the maximum of (\d+) pixels")
_VOCABULARY = re.compile(r"Vocabulary size: (\d+)")
_GRAMMAR = re.compile(r"Grammar error|json schema into a grammar|Invalid grammar specification|JSON schema contains")
_NO_TOOLS = (
    "This model's engine runs without a tool parser, so it cannot call functions. Leave `tools` out, or ask for JSON "
    "with `response_format`."
)


def _bad_request(found: EngineFault, request: EngineRequest) -> DomainError:
    """Return the engine's complaint in our own words if it is known, because the engine's text may show internals."""
    limit = _CONTEXT.search(found.message)
    if found.param in _OUTPUT_FIELDS and limit:
        return InvalidValue(
            f"`{found.param}` is above what fits this model's context of {_first(limit)} tokens. Lower it.",
            param=found.param,
        )
    if limit:
        return _too_long(found.message, _first(limit), request)
    if pixels := _PIXELS.search(found.message):
        text = f"An image has more than {int(pixels[1]):,} pixels. Send it in a smaller size."
        return InvalidValue(text, param=request.prompt_param)
    if "--tool-call-parser" in found.message:
        return UnsupportedParameter(_NO_TOOLS, param="tools")
    if "response_format" in request.fields and _GRAMMAR.search(found.message):
        return InvalidValue(
            "The model's engine cannot compile the schema. Leave out rare keywords of JSON Schema.",
            param="response_format.json_schema.schema",
        )
    if "vocab" in found.message:
        param = found.param if found.param in request.fields else request.prompt_param
        size = _VOCABULARY.search(found.message)
        known = f": its ids end at {int(size[1]) - 1}" if size else ""
        return InvalidValue(f"`{param}` holds token ids that this model does not know{known}.", param=param)
    if found.param in (None, "", "messages") and (refused := _refused_roles(found.message, request)):
        return refused
    if found.param in request.fields:
        return InvalidValue(f"The model refuses the value of `{found.param}`.", param=found.param)
    return InvalidValue(
        "The model refuses this request: its messages or parameters do not fit its chat template or limits."
    )


def _too_long(message: str, limit: str, request: EngineRequest) -> DomainError:
    counted = _COUNTED.search(message)
    has = f" and `{request.prompt_param}` has {counted[1] or ''}{counted[2]} {counted[3]}" if counted else ""
    room = f", with {request.max_tokens} set aside for the answer" if request.max_tokens else ""
    return ContextLengthExceeded(
        f"This model's context is {limit} tokens{has}{room}. Shorten the prompt or lower `max_tokens`.",
        param=request.prompt_param,
    )


def _first(found: re.Match[str]) -> str:
    return next(group for group in found.groups() if group)


# --- Chat templates ---------------------------------------------------------------------------------------------------

_ROLES = re.compile(r"\broles?\b|system message", re.IGNORECASE)
_FIXES = {
    "system": "Put the text of system and developer messages into the first user message.",
    "tool": "Put the tool's result into a user message.",
}


def _refused_roles(reason: str, request: EngineRequest) -> DomainError | None:
    """Return the error for messages whose roles the model's chat template refuses, None for another reason.

    Templates raise texts of their own, such as "System role not supported". The message is found by their words.
    """
    if "messages" not in request.fields or not _ROLES.search(reason):
        return None
    roles = [str(message["role"]) for message in cast(list[dict[str, Any]], request.fields["messages"])]
    words = reason.lower()
    if "alternate" in words and (turn := _out_of_turn(roles)) is not None:
        text = "is out of turn: this model's chat template takes user and assistant messages in turn. Merge neighbours"
        return _refused_role(request, turn, f"{text} of one role, and begin with the user.")
    if "beginning" in words and "system" in roles[1:]:
        text = "is a system message, which this model's chat template takes only at the beginning. Move it there."
        return _refused_role(request, roles.index("system", 1), text)
    is_list = "only" in words  # of the roles that the template knows
    unknown = next((at for at, role in enumerate(roles) if role in _FIXES and (role in words) is not is_list), None)
    if unknown is None:  # the text names none: most templates know the role 'system'
        unknown = next((roles.index(role) for role in ("tool", "system") if role in roles), None)
    if unknown is None:
        return None
    role = roles[unknown]
    return _refused_role(
        request, unknown, f"has the role '{role}', which this model's chat template does not take here. {_FIXES[role]}"
    )


def _out_of_turn(roles: Sequence[str]) -> int | None:
    """Return the place of the first message that is not in turn after a first system message."""
    begin = int(roles[:1] == ["system"])
    wanted = ("user", "assistant")
    return next((at for at, role in enumerate(roles[begin:], begin) if role != wanted[(at - begin) % 2]), None)


def _refused_role(request: EngineRequest, at: int, text: str) -> InvalidValue:
    """Return the error; on other surfaces than chat, messages are made of several fields."""
    if request.prompt_param != "messages":
        return InvalidValue(f"A message of `{request.prompt_param}` {text}", param=request.prompt_param)
    return InvalidValue(f"`messages[{at}]` {text}", param=f"messages[{at}].role")
