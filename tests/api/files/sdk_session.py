"""One session of the official SDK with files and models, run by a process of its own for each version of the SDK.

Arguments: base URL, API key, folder of the SDK ("" for the installed one). Prints what it saw as JSON.
"""

import hashlib
import json
import sys

base_url, key, folder = sys.argv[1:]
if folder:
    sys.path.insert(0, folder)

import openai  # noqa: E402 - from the folder above

ROWS = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n' * 12

client = openai.OpenAI(api_key=key, base_url=f"{base_url}/v1", max_retries=0)
created = client.files.create(
    file=("train.jsonl", ROWS), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 7200}
)
processed = client.files.wait_for_processing(created.id, poll_interval=0.2, max_wait_seconds=240)
seen = {
    "version": openai.__version__,
    "created": created.to_dict(),
    "processed": processed.to_dict(),
    "listed": [file.id for file in client.files.list(purpose="fine-tune")],
    "content_is_equal": client.files.content(created.id).read() == ROWS,
    "models": [model.id for model in client.models.list()],
    "model": client.models.retrieve("anneal-demo").to_dict(),
    "deleted": client.files.delete(created.id).to_dict(),
    "left": [file.id for file in client.files.list()],
}
try:
    client.files.retrieve(created.id)
except openai.NotFoundError as error:
    seen["after"] = [error.status_code, error.code, bool(error.request_id)]


def in_parts(md5: str) -> openai.types.Upload:
    return client.uploads.upload_file_chunked(
        file=ROWS, filename="big.jsonl", bytes=len(ROWS), mime_type="application/jsonl", purpose="fine-tune",
        part_size=len(ROWS) // 2 - 7, md5=md5,
    )  # fmt: skip


chunked = in_parts(hashlib.md5(ROWS).hexdigest())
seen["upload"] = chunked.to_dict()
seen["upload_is_equal"] = client.files.content(chunked.file.id).read() == ROWS
try:
    in_parts("0" * 32)
except openai.BadRequestError as error:
    seen["wrong_md5"] = [error.status_code, error.code, error.param]
pending = client.uploads.create(bytes=30, filename="a.jsonl", mime_type="text/plain", purpose="fine-tune")
second = client.uploads.parts.create(pending.id, data=b"b" * 10)
first = client.uploads.parts.create(pending.id, data=b"a" * 20)
seen["part"] = first.to_dict()
ordered = client.uploads.complete(pending.id, part_ids=[first.id, second.id])
seen["ordered"] = client.files.content(ordered.file.id).read().decode()
cancelled = client.uploads.create(bytes=30, filename="a.jsonl", mime_type="text/plain", purpose="fine-tune")
seen["cancelled"] = client.uploads.cancel(cancelled.id).status
try:
    client.uploads.parts.create(cancelled.id, data=b"x")
except openai.BadRequestError as error:
    seen["closed"] = [error.status_code, error.code]
sys.stdout.write(json.dumps(seen))
