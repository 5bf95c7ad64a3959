"""Every documented parameter of both surfaces, sent by a client library; prints what came of each.

python conformance_session.py SOCKET KEY MODEL openai|litellm [FOLDER_OF_THE_CLIENT]

Each case is its own prompt, "case:<name>", so that the test can look up what the engine was asked for it.
"""

import json
import sys

socket_path, key, model, library, folder = sys.argv[1:6]
if folder:
    sys.path.insert(0, folder)

import httpx  # noqa: E402 - after the folder of the client
import openai  # noqa: E402

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True}}
SAMPLING = {
    "temperature": 0.3, "top_p": 0.9, "n": 2, "seed": 7, "max_tokens": 5, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "logit_bias": {"5": -10}, "user": "u",
}  # fmt: skip
CHAT = {name: {name: value} for name, value in SAMPLING.items()} | {
    "plain": {},
    "stop": {"stop": "."},
    "stops": {"stop": ["a", "b"]},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": SCHEMA},
    "text": {"response_format": {"type": "text"}},
    "tools": {"tools": [TOOL]},
    "tool_choice": {"tools": [TOOL], "tool_choice": "auto"},
    "tool_named": {"tools": [TOOL], "tool_choice": NAMED},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "metadata": {"metadata": {"a": "b"}},
    "store": {"store": False},
    "service_tier": {"service_tier": "auto"},
    "modalities": {"modalities": ["text"]},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "verbosity": {"verbosity": "low"},
    "safety_identifier": {"safety_identifier": "s"},
    "prompt_cache_key": {"prompt_cache_key": "k"},
}
CHAT_REFUSED = {
    "functions": {"functions": [{"name": "f"}]},
    "function_call": {"function_call": "auto"},
    "audio": {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}},
    "web_search_options": {"web_search_options": {"search_context_size": "low"}},
    "n": {"n": 9},
    "temperature": {"temperature": 3},
}
COMPLETION = {name: {name: value} for name, value in SAMPLING.items()} | {
    "plain": {},
    "stop": {"stop": ["a", "b"]},
    "logprobs": {"logprobs": 2},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
}
COMPLETION_REFUSED = {"suffix": {"suffix": "x"}, "echo": {"echo": True}, "best_of": {"best_of": 3}}
# Younger than the oldest client.
UNKNOWN = ("verbosity", "safety_identifier", "prompt_cache_key")


def through_openai(kind: str, asked: dict) -> object:
    create = client.chat.completions.create if kind == "chat" else client.completions.create
    unknown = {name: asked[name] for name in asked if name in UNKNOWN}
    known = {name: value for name, value in asked.items() if name not in unknown}
    return create(model=model, **known, extra_body=unknown or None)


def through_litellm(kind: str, asked: dict) -> object:
    import litellm

    ask = litellm.completion if kind == "chat" else litellm.text_completion
    place = {"client": client, "api_key": key, "api_base": "http://gateway/v1", "max_retries": 0}
    # It refuses by itself what it does not know of a model it has never heard of, unless told to send it.
    insisted = [name for name in asked if name in UNKNOWN]
    return ask(model=f"openai/{model}", allowed_openai_params=insisted, **place, **asked)


def text_of(kind: str, answer: object) -> str:
    if not hasattr(answer, "choices"):  # a stream
        chunks = [chunk for chunk in answer if chunk.choices]
        parts = [chunk.choices[0].delta.content if kind == "chat" else chunk.choices[0].text for chunk in chunks]
        return "".join(part or "" for part in parts)
    choice = answer.choices[0]
    return (choice.message.content if kind == "chat" else choice.text) or ""


def outcome(kind: str, name: str, asked: dict) -> object:
    words = f"case:{kind}:{name}"
    prompt = {"messages": [{"role": "user", "content": words}]} if kind == "chat" else {"prompt": words}
    try:
        return text_of(kind, ask(kind, prompt | asked))
    except Exception as error:  # noqa: BLE001 - whatever a client raises is what the test looks at
        status = getattr(error, "status_code", None)
        return [type(error).__name__, status, str(error)[:300]]


ask = through_openai if library == "openai" else through_litellm
with httpx.Client(transport=httpx.HTTPTransport(uds=socket_path), timeout=30) as http:
    client = openai.OpenAI(api_key=key, base_url="http://gateway/v1", http_client=http, max_retries=0)
    cases = {
        "chat": CHAT,
        "chat_refused": CHAT_REFUSED,
        "completion": COMPLETION,
        "completion_refused": COMPLETION_REFUSED,
    }
    seen = {
        group: {name: outcome(group.split("_")[0], name, asked) for name, asked in given.items()}
        for group, given in cases.items()
    }
sys.stdout.write("\n" + json.dumps({"version": openai.__version__, "seen": seen}))
