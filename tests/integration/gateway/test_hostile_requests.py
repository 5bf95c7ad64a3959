"""The parsers read or refuse every request in little time; a refusal names its cause.

Marked nightly: some thousands of random requests, and the compiler's process.
"""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apps.core.errors import InvalidValue
from apps.interfaces.gateway.requests.grammars import Grammars
from apps.interfaces.gateway.requests.schema import parse_chat, parse_completion
from apps.interfaces.gateway.surfaces.responses import parse_response
from tests.support.gateway.hostile_requests import chats, completions, read, responses, schemas

pytestmark = pytest.mark.nightly

EXAMPLES = settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))


@EXAMPLES
@given(chats)
def test_chats(body):
    read(parse_chat, json.dumps(body).encode())


@EXAMPLES
@given(completions)
def test_completions(body):
    read(parse_completion, json.dumps(body).encode())


@EXAMPLES
@given(responses)
def test_responses(body):
    read(parse_response, json.dumps(body).encode())


@EXAMPLES
@given(st.binary(max_size=200))
def test_bytes(raw):
    for parse in (parse_chat, parse_completion, parse_response):
        read(parse, raw)


def test_schemas_compile_or_are_refused_and_the_compiler_lives_on():
    loop = asyncio.new_event_loop()
    grammars = Grammars()

    @EXAMPLES
    @given(schemas)
    def check(schema: dict[str, Any]) -> None:
        named = {"name": "s", "schema": schema}
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        body |= {"response_format": {"type": "json_schema", "json_schema": named}}
        request = read(parse_chat, json.dumps(body).encode())
        if request is not None:
            try:
                loop.run_until_complete(grammars.require("org_1", request.schemas))
            except InvalidValue as refusal:
                assert refusal.param == "response_format.json_schema.schema"

    try:
        check()
    finally:
        loop.run_until_complete(grammars.close())
        loop.close()
