"""OpenAI's fine-tuning jobs and files on loopback, with its shapes, pages and errors, for one key.

The members are those of the official client's types (`openai` 3.52.0: `FineTuningJob`, `FileObject`).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.twins.http_server import Answer, Request, serve_http

KEY = "sk-proj-twin-0123456789"


@dataclass
class OpenAiTwin:
    """Jobs are listed newest first: the last one added. Attributes may be changed while clients talk to it."""

    url: str = ""
    jobs: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    most_per_page: int = 2

    def add_job(self, number: int, rows: bytes, **changes: Any) -> dict[str, Any]:
        file_id = f"file-{number:024}"
        self.files[file_id] = rows
        job = {
            "object": "fine_tuning.job", "id": f"ftjob-{number:024}", "model": "gpt-4o-mini-2024-07-18",
            "created_at": 1_760_000_000 + number, "finished_at": 1_760_001_000 + number,
            "fine_tuned_model": f"ft:gpt-4o-mini-2024-07-18:acme:faq-bot:9aBcD{number}", "organization_id": "org-twin",
            "result_files": ["file-results"], "status": "succeeded", "validation_file": None,
            "training_file": file_id, "trained_tokens": 5_768, "seed": 42, "estimated_finish": None,
            "integrations": [], "metadata": None, "usage_metrics": None, "shared_with_openai": False,
            "user_provided_suffix": "faq-bot", "eval_id": None,
            "error": {"code": None, "param": None, "message": None},
            "hyperparameters": {"n_epochs": 3, "batch_size": 1, "learning_rate_multiplier": 1.8},
            "method": {
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": 1, "learning_rate_multiplier": 1.8}},
            },
        }  # fmt: skip
        self.jobs.append(job | changes)
        return self.jobs[-1]

    def answer(self, request: Request) -> Answer:
        self.requests.append(f"{request.method} {request.path}")
        path, query = urlsplit(request.path).path, parse_qs(urlsplit(request.path).query)
        if request.bearer != KEY:
            return _error(401, "Incorrect API key provided: sk-***.", "invalid_api_key")
        if request.method == "GET" and path == "/v1/fine_tuning/jobs":
            return self._list_jobs(query)
        file_id = path.removeprefix("/v1/files/").removesuffix("/content")
        if request.method == "GET" and path.endswith("/content") and file_id in self.files:
            return Answer(content=self.files[file_id], headers={"Content-Type": "application/octet-stream"})
        return _error(404, f"No such File object: {file_id}", None)

    def _list_jobs(self, query: dict[str, list[str]]) -> Answer:
        newest_first = self.jobs[::-1]
        after = query.get("after", [""])[0]
        ids = [job["id"] for job in newest_first]
        begin = ids.index(after) + 1 if after else 0
        end = begin + min(int(query.get("limit", ["20"])[0]), self.most_per_page)
        page = {"object": "list", "data": newest_first[begin:end], "has_more": end < len(ids)}
        return Answer(content=json.dumps(page).encode(), headers={"Content-Type": "application/json"})


def _error(status: int, message: str, code: str | None) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return Answer(status, json.dumps({"error": error}).encode(), {"Content-Type": "application/json"})


@contextmanager
def serve_openai() -> Iterator[OpenAiTwin]:
    twin = OpenAiTwin()
    with serve_http(twin.answer) as address:
        twin.url = f"{address}/v1"
        yield twin
