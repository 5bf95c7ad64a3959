"""What a customer's program does with the gateway, run with either generation of the SDK; prints what it saw.

python sessions/sdk.py SOCKET KEY MODEL FOREIGN_MODEL [FOLDER_OF_THE_SDK]
"""

import json
import sys

socket_path, key, model, foreign_model, folder = sys.argv[1:6]
if folder:
    sys.path.insert(0, folder)

import httpx  # noqa: E402 - after the folder of the SDK
import openai  # noqa: E402

HI = [{"role": "user", "content": "Hi"}]


def refusal(kind: type[openai.APIStatusError], **fields: object) -> list[object]:
    try:
        client.chat.completions.create(**({"model": model, "messages": HI} | fields))
    except kind as error:
        return [error.status_code, error.code, error.param, bool(error.request_id)]
    raise SystemExit(f"no {kind.__name__}")


with httpx.Client(transport=httpx.HTTPTransport(uds=socket_path)) as http:
    client = openai.OpenAI(api_key=key, base_url="http://gateway/v1", http_client=http)
    whole = client.chat.completions.create(model=model, messages=HI, temperature=0, max_tokens=8)
    chunks = list(
        client.chat.completions.create(model=model, messages=HI, stream=True, stream_options={"include_usage": True})
    )
    completion = client.completions.create(model=model, prompt="Hi", max_tokens=8)
    seen = {
        "version": openai.__version__,
        "whole": whole.choices[0].message.content,
        "tokens": whole.usage.total_tokens,
        "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "usage": chunks[-1].usage.completion_tokens,
        "completion": completion.choices[0].text,
        "foreign": refusal(openai.NotFoundError, model=foreign_model),
        "bad": refusal(openai.BadRequestError, n=129),
    }
sys.stdout.write(json.dumps(seen))
