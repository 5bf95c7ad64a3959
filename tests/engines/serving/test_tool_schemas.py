"""The schema that the gateway compiles for a required call is the one that vLLM builds."""

import json
import subprocess
import sys

from apps.interfaces.gateway.requests.structured import schemas_to_compile

TOOLS = [
    {"name": "a", "parameters": {"properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"type": "string"}}}},
    {"name": "b"},
    {"name": "c", "parameters": {}},
]
BUILD = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.tool_parsers.utils import get_json_schema_from_tools

fields = json.load(sys.stdin)
tools = [ChatCompletionToolsParam.model_validate(tool) for tool in fields["tools"]]
print(json.dumps(get_json_schema_from_tools("required", tools, fields["parallel_tool_calls"])))
"""


def test_a_required_call_is_compiled_as_the_engine_compiles_it():
    """vLLM is imported in a process of its own, because its imports warn."""
    tools = [{"type": "function", "function": function} for function in TOOLS]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}

    *_, ours = schemas_to_compile(fields)

    built = subprocess.run([sys.executable, "-c", BUILD], input=json.dumps(fields), capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert ours.schema == json.loads(built.stdout.splitlines()[-1])
