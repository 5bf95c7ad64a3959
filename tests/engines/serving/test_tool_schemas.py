"""The schema that the gateway compiles for a required call is the one that vLLM builds."""

import copy

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.tool_parsers.utils import get_json_schema_from_tools

from apps.interfaces.gateway.requests.structured import schemas_to_compile

TOOLS = [
    {"name": "a", "parameters": {"properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"type": "string"}}}},
    {"name": "b"},
    {"name": "c", "parameters": {}},
]


@pytest.mark.parametrize("in_parallel", [None, True, False])
def test_a_required_call_is_compiled_as_the_engine_compiles_it(in_parallel):
    tools = [{"type": "function", "function": function} for function in TOOLS]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": in_parallel}

    *_, ours = schemas_to_compile(fields)

    theirs = [ChatCompletionToolsParam.model_validate(tool) for tool in copy.deepcopy(tools)]
    assert ours.schema == get_json_schema_from_tools("required", theirs, in_parallel)
