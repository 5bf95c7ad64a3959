"""What a program with LangChain does with the gateway; prints what it saw.

python sessions/langchain_chats.py SOCKET KEY MODEL langchain FOLDER_OF_LANGCHAIN
"""

import asyncio
import json
import sys

socket_path, key, model, _, folder = sys.argv[1:6]
sys.path.insert(0, folder)

import httpx  # noqa: E402 - after the folder
import openai  # noqa: E402
from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
from pydantic import BaseModel  # noqa: E402


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"7 degrees in {city}"


def chat(**options: object) -> ChatOpenAI:
    place = {"base_url": "http://gateway/v1", "api_key": key, "http_client": http, "max_retries": 0}
    return ChatOpenAI(**{"model": model} | place | options)


def prompt(name: str) -> str:
    return f"case:langchain:{name}"


def called() -> dict[str, object]:
    """Let the model call a tool, and answer with what it returned."""
    asked = HumanMessage(prompt("tool"))
    able = chat().bind_tools([weather])
    answer = able.invoke([asked])
    results = [weather.invoke(call) for call in answer.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    first, *others = able.stream([asked])
    streamed = sum(others, first).tool_calls
    return {"whole": answer.tool_calls, "streamed": streamed, "after": able.invoke([asked, answer, *results]).content}


def refused() -> list[object]:
    try:
        chat(model="nothing-here").invoke(prompt("refused"))
    except openai.NotFoundError as error:
        return [error.status_code, error.code]
    raise SystemExit("an unknown model answered")


async def asynchronous() -> list[str]:
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=socket_path)) as asynchronous_http:
        asked = chat(http_async_client=asynchronous_http)
        whole = await asked.ainvoke(prompt("ainvoke"))
        return [whole.content, "".join([chunk.content async for chunk in asked.astream(prompt("astream"))])]


with httpx.Client(transport=httpx.HTTPTransport(uds=socket_path), timeout=30) as http:
    whole = chat(temperature=0.3).invoke(prompt("invoke"))
    seen = {
        "invoke": whole.content,
        "tokens": whole.usage_metadata["total_tokens"],
        "finish": whole.response_metadata["finish_reason"],
        "stream": "".join(chunk.content for chunk in chat().stream(prompt("stream"))),
        "batch": [answer.content for answer in chat().batch([prompt("batch"), prompt("batch")])],
        "asynchronous": asyncio.run(asynchronous()),
        "tools": called(),
        "refused": refused(),
        "responses": chat(use_responses_api=True).invoke(prompt("responses")).text,
    }
    for method in ("json_schema", "function_calling", "json_mode"):
        read = chat().with_structured_output(Weather, method=method).invoke(prompt(method))
        seen[method] = read.model_dump()
sys.stdout.write("\n" + json.dumps(seen))
