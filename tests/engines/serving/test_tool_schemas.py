"""The schema that the gateway compiles for a required call is the one that vLLM builds."""

import os
import warnings
from unittest import mock

import pytest

from apps.interfaces.gateway.requests.structured import schemas_to_compile

TOOLS = [
    {"name": "a", "parameters": {"properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"type": "string"}}}},
    {"name": "b"},
    {"name": "c", "parameters": {}},
]


def build(tools: list[dict[str, object]]) -> object:
    """Return vLLM's schema. Its imports warn and set variables of the process."""
    with warnings.catch_warnings(action="ignore"), mock.patch.dict(os.environ):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
        from vllm.tool_parsers.utils import get_json_schema_from_tools

        known = [ChatCompletionToolsParam.model_validate(tool) for tool in tools]
        return get_json_schema_from_tools("required", known, parallel_tool_calls=False)


@pytest.mark.slow
def test_a_required_call_is_compiled_as_the_engine_compiles_it():
    tools = [{"type": "function", "function": function} for function in TOOLS]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}

    *_, ours = schemas_to_compile(fields)

    assert ours.schema == build(tools)
