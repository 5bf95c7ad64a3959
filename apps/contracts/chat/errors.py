"""Errors of one row, with stable codes."""

from enum import StrEnum


class RowErrorCode(StrEnum):
    """Stable codes of errors in one line."""

    LINE_TOO_LONG = "line_too_long"
    NOT_UTF8 = "not_utf8"
    NUL_CHARACTER = "nul_character"
    LONE_SURROGATE = "lone_surrogate"
    INVALID_JSON = "invalid_json"
    INVALID_NUMBER = "invalid_number"
    DUPLICATE_KEY = "duplicate_key"
    TOO_DEEP = "too_deep"
    NOT_AN_OBJECT = "not_an_object"
    UNKNOWN_KEY = "unknown_key"
    MISSING_MESSAGES = "missing_messages"
    INVALID_MESSAGES = "invalid_messages"
    TOO_MANY_MESSAGES = "too_many_messages"
    INVALID_MESSAGE = "invalid_message"
    INVALID_ROLE = "invalid_role"
    INVALID_CONTENT = "invalid_content"
    EMPTY_ASSISTANT_CONTENT = "empty_assistant_content"
    LAST_MESSAGE_NOT_ASSISTANT = "last_message_not_assistant"
    INVALID_WEIGHT = "invalid_weight"
    NO_TRAINED_MESSAGE = "no_trained_message"
    INVALID_TOOLS = "invalid_tools"
    INVALID_TOOL_CALLS = "invalid_tool_calls"
    UNKNOWN_TOOL_CALL_ID = "unknown_tool_call_id"
    MISSING_PREFERENCE = "missing_preference"
    SAME_ANSWERS = "same_answers"
    MISSING_TEXT = "missing_text"
    # Found while rendering, so they depend on the base model.
    TEMPLATE_REJECTED = "template_rejected"
    TEMPLATE_NOT_PREFIX_STABLE = "template_not_prefix_stable"
    CONTROL_TOKEN_IN_CONTENT = "control_token_in_content"  # noqa: S105 (not a secret)


class RowError(Exception):
    """A line that cannot be used: its number, the error's `code` and message, the field (`param`), and the fix."""

    def __init__(self, line: int, code: RowErrorCode, message: str, *, param: str | None = None, fix: str = "") -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
        self.code = code
        self.message = message
        self.param = param
        self.fix = fix


class TemplateRejectedRow(RowError):
    """The chat template refuses this order of roles, or fails on it."""


class TemplateNotPrefixStable(RowError):
    """The template renders earlier turns differently once later ones follow, so a mask would be unreliable."""


def json_type(value: object) -> str:
    """Return the JSON name of a parsed value's type."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def short(text: str) -> str:
    """Return the text quoted and cut to fit into a sentence."""
    return f"`{text if len(text) <= 40 else text[:39] + '…'}`"
