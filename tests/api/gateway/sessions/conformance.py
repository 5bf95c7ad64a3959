"""Every documented parameter of each surface, sent by a client library; prints what came of each.

python sessions/conformance.py SOCKET KEY MODEL openai|litellm [FOLDER_OF_THE_CLIENT]

Each case is its own prompt, "case:<surface>:<name>", so that the test can look up what the engine was asked for it.
What the library itself names as parameters is printed too: the test holds the cases against it.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterator

socket_path, key, model, library, folder = sys.argv[1:6]
if folder:
    sys.path.insert(0, folder)

import httpx  # noqa: E402 - after the folder of the client
import openai  # noqa: E402

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
FLAT_TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True}}
SAMPLING = {
    "temperature": 0.3, "top_p": 0.9, "n": 2, "seed": 7, "max_tokens": 5, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "logit_bias": {"5": -10}, "user": "u",
}  # fmt: skip
# Documented by OpenAI, without effect on what a model here answers.
WITHOUT_EFFECT = {
    "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "24h",
}  # fmt: skip
CHAT = {name: {name: value} for name, value in (SAMPLING | WITHOUT_EFFECT).items()} | {
    "plain": {},
    "stop": {"stop": "."},
    "stops": {"stop": ["a", "b"]},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "logprobs": {"logprobs": True, "top_logprobs": 20},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": SCHEMA},
    "text": {"response_format": {"type": "text"}},
    "tools": {"tools": [TOOL]},
    "tool_choice": {"tools": [TOOL], "tool_choice": "auto"},
    "tool_named": {"tools": [TOOL], "tool_choice": NAMED},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "modalities": {"modalities": ["text"]},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "verbosity": {"verbosity": "low"},
}
CHAT_REFUSED = {
    "functions": {"functions": [{"name": "f"}]},
    "function_call": {"function_call": "auto"},
    "audio": {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}},
    "web_search_options": {"web_search_options": {"search_context_size": "low"}},
    "moderation": {"moderation": {"model": "omni-moderation-latest"}},
    "n": {"n": 129},
    "temperature": {"temperature": 3},
    "top_logprobs": {"top_logprobs": 2},
}
COMPLETION = {name: {name: value} for name, value in SAMPLING.items()} | {
    "plain": {},
    "stop": {"stop": ["a", "b"]},
    "logprobs": {"logprobs": 2},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
}
COMPLETION_REFUSED = {"suffix": {"suffix": "x"}, "echo": {"echo": True}, "best_of": {"best_of": 3}}
RESPONSE = {name: {name: value} for name, value in WITHOUT_EFFECT.items()} | {
    "plain": {},
    "temperature": {"temperature": 0.3},
    "top_p": {"top_p": 0.9},
    "instructions": {"instructions": "Be brief."},
    "max_output_tokens": {"max_output_tokens": 5},
    "text": {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}},
    "tools": {"tools": [FLAT_TOOL]},
    "tool_choice": {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "weather"}},
    "parallel_tool_calls": {"tools": [FLAT_TOOL], "parallel_tool_calls": False},
    "top_logprobs": {"top_logprobs": 2},
    "include": {"include": ["message.output_text.logprobs"]},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_obfuscation": False}},
    "access_programs": {"access_programs": {}},
    "background_options": {"background_options": {}},
    "context_management": {"context_management": [{"type": "compaction"}]},
    "image": {"image": {}},
    "max_tool_calls": {"max_tool_calls": 3},
    "reasoning": {"reasoning": {"effort": "low"}},
    "truncation": {"truncation": "auto"},
    "user": {"user": "u"},
}
RESPONSE_REFUSED = {
    "background": {"background": True},
    "conversation": {"conversation": "conv_1"},
    "previous_response_id": {"previous_response_id": "resp_1"},
    "prompt": {"prompt": {"id": "pmpt_1"}},
    "moderation": {"moderation": {"model": "omni-moderation-latest"}},
    "store": {"store": True},
}
# No engine here makes embeddings: each request that is well formed is told so.
EMBEDDING_REFUSED = {
    "plain": {},
    "dimensions": {"dimensions": 8},
    "encoding_format": {"encoding_format": "float"},
    "user": {"user": "u"},
}
CASES = {
    "chat": CHAT,
    "chat_refused": CHAT_REFUSED,
    "completion": COMPLETION,
    "completion_refused": COMPLETION_REFUSED,
    "response": RESPONSE,
    "response_refused": RESPONSE_REFUSED,
    "embedding_refused": EMBEDDING_REFUSED,
}


def parameters(call: Callable[..., object]) -> set[str]:
    return set(inspect.signature(call).parameters)


def through_openai(surface: str, asked: dict) -> object:
    """What this generation of the package does not know yet goes with `extra_body`, as its users send it."""
    create = creators[surface]
    known = {name: value for name, value in asked.items() if name in parameters(create)}
    return create(model=model, **known, extra_body={name: asked[name] for name in asked if name not in known} or None)


def through_litellm(surface: str, asked: dict) -> object:
    import litellm

    asks = {"chat": litellm.completion, "completion": litellm.text_completion, "embedding": litellm.embedding}
    place = {"client": client, "api_key": key, "api_base": "http://gateway/v1", "max_retries": 0}
    if surface == "response":  # asked without the package of OpenAI
        from litellm.llms.custom_httpx.http_handler import HTTPHandler

        known = {name: asked[name] for name in asked if name in parameters(litellm.responses)}
        place |= {"client": HTTPHandler(client=http), "extra_body": {n: asked[n] for n in asked if n not in known}}
        asks, asked = {"response": litellm.responses}, known
    # It refuses by itself what it does not know of a model it has never heard of, unless told to send it.
    return asks[surface](model=f"openai/{model}", allowed_openai_params=list(asked), **place, **asked)


def text_of(surface: str, answer: object) -> str:
    if surface == "response":
        if hasattr(answer, "output_text"):
            return answer.output_text
        return "".join(event.delta for event in answer if event.type == "response.output_text.delta")
    if not hasattr(answer, "choices"):  # a stream
        chunks = [chunk for chunk in answer if chunk.choices]
        parts = [chunk.choices[0].delta.content if surface == "chat" else chunk.choices[0].text for chunk in chunks]
        return "".join(part or "" for part in parts)
    choice = answer.choices[0]
    return (choice.message.content if surface == "chat" else choice.text) or ""


def outcome(surface: str, name: str, asked: dict) -> object:
    words = f"case:{surface}:{name}"
    prompts = {"chat": {"messages": [{"role": "user", "content": words}]}, "completion": {"prompt": words}}
    try:
        return text_of(surface, ask(surface, prompts.get(surface, {"input": words}) | asked))
    except Exception as error:  # noqa: BLE001 - the test looks at what a client raises
        status = getattr(error, "status_code", None)
        return [type(error).__name__, status, f"{getattr(error, 'code', None)} {error}"[:300]]


def named() -> Iterator[tuple[str, list[str]]]:
    for surface, create in creators.items():
        yield surface, sorted(name for name in parameters(create) if not name.startswith("extra_"))


ask = through_openai if library == "openai" else through_litellm
with httpx.Client(transport=httpx.HTTPTransport(uds=socket_path), timeout=30) as http:
    client = openai.OpenAI(api_key=key, base_url="http://gateway/v1", http_client=http, max_retries=0)
    creators = {
        "chat": client.chat.completions.create,
        "completion": client.completions.create,
        "response": client.responses.create,
        "embedding": client.embeddings.create,
    }
    seen = {
        group: {name: outcome(group.split("_")[0], name, asked) for name, asked in given.items()}
        for group, given in CASES.items()
    }
    covered = {
        surface: sorted({name for group in CASES if group.split("_")[0] == surface for asked in CASES[group].values()
                         for name in asked})
        for surface in creators
    }  # fmt: skip
    parameters_named = dict(named())
sys.stdout.write(
    "\n" + json.dumps({"version": openai.__version__, "seen": seen, "named": parameters_named, "covered": covered})
)
