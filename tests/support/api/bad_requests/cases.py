"""Wrong requests to the public API: body, estimates, uploads, queries, administration, addresses."""

from typing import Any

from tests.support.api.bad_requests import (
    ESTIMATES,
    FILE,
    FILES,
    INVALID_JSON,
    JOB,
    JOBS,
    MISSING,
    NO_FILE,
    NO_JOB,
    NO_MODEL,
    UNKNOWN,
    UPLOAD,
    UPLOADS,
    Case,
)

_FORM = "multipart/form-data; boundary=x"
_PART = b'--x\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\nabc\r\n--x--\r\n'


def _estimate(param: str, code: str = "invalid_value", **fields: Any) -> Case:
    return Case(ESTIMATES, {"model": "anneal-demo", "training_file": FILE} | fields, param, code=code)


def _nested(depth: int) -> bytes:
    return b'{"model":' + b"[" * depth + b"]" * depth + b"}"


API = [
    *(
        Case(UPLOADS, UPLOAD, "Idempotency-Key", headers={"Idempotency-Key": value})
        for value in ("", "k" * 256, "two words", "\t", "ключ", "\x7f", "a\x00")
    ),
    # The body itself.
    *(
        Case(JOBS, body, code=INVALID_JSON)
        for body in (
            b"{",
            b'{"model": }',
            b'{"model": "a",}',
            b"not json",
            b"\xff\xfe",
            b'"half',
            b'{"a": NaN}',
            b'{"a": Infinity}',
            b'{"a": -Infinity}',
            b'{"a": ' + b"9" * 5000 + b"}",
            b'{"model": "a", "model": "b"}',
            b'{"a": 01}',
            b"{'a': 1}",
            _nested(50_000),
            b"\xef\xbb\xbf{}",
            b"{} {}",
        )
    ),
    *(
        Case(JOBS, body, "a", code=INVALID_JSON)
        for body in (b'{"a": 1e400}', b'{"a": -1e400}', b'{"a": ' + b"9" * 30 + b"}", b'{"a": "\\u0000"}')
    ),
    Case(JOBS, b'{"a": {"b": [1, "\\ud800"]}}', "a.b[1]", code=INVALID_JSON),
    *(Case(JOBS, body, code=INVALID_JSON) for body in (b'{"\\u0000": 1}', b'"\\ud800"')),
    Case(JOBS, b'{"model": [' + b"{}," * 50_000 + b"{}]}", status=413, code="request_too_large"),
    Case(JOBS, _nested(70), "model" + "[0]" * 64, code=INVALID_JSON),
    *(Case(JOBS, body) for body in (b"[]", b"3", b'"text"', b"null", b"true")),
    Case(JOBS, b"model=a", status=415, code="unsupported_media_type", content_type="text/plain"),
    Case(JOBS, b"model=a", status=415, code="unsupported_media_type", content_type="application/x-www-form-urlencoded"),
    Case(JOBS, b"a: b", status=415, code="unsupported_media_type", content_type="application/yaml"),
    Case(FILES, {"purpose": "fine-tune"}, status=415, code="unsupported_media_type"),
    Case(FILES, b"--x--", code="invalid_multipart", content_type="multipart/form-data"),
    Case(FILES, b"x", code="invalid_multipart", content_type="multipart/form-data; boundary="),
    Case(FILES, b"--x--\r\n", "purpose", code=MISSING, content_type=_FORM),
    Case(f"{UPLOADS}/upload_x/parts", _PART, "upload_id", 404, "upload_not_found", content_type=_FORM),
    Case(f"{UPLOADS}/upload_x/parts", b"--x--\r\n", "data", code=MISSING, content_type=_FORM),
    # Estimates and what else takes JSON.
    Case(ESTIMATES, {"model": "anneal-demo"}, "training_file", code=MISSING),
    Case(ESTIMATES, {"model": "no-such", "training_file": FILE}, "model", 404, NO_MODEL),
    Case(ESTIMATES, {"model": "anneal-demo", "training_file": "file-x"}, "training_file", 404, NO_FILE),
    _estimate("recipe.lora_rank", lora={"rank": 8}, recipe={"lora_rank": 16}),
    _estimate("lora.r", UNKNOWN, lora={"r": 8}),
    _estimate("recipe.epochs", recipe={"epochs": -1}),
    _estimate("exports[0]", exports=["onnx"]),
    _estimate("method.kind", UNKNOWN, method={"type": "dpo", "kind": "x"}),
    _estimate("needed_by", needed_by="soon"),
    Case(UPLOADS, {}, "bytes", code=MISSING),
    Case(UPLOADS, {"bytes": "9", "filename": "a.jsonl", "purpose": "fine-tune"}, "bytes"),
    Case(UPLOADS, {"bytes": -1, "filename": "a.jsonl", "purpose": "fine-tune"}, "bytes"),
    Case(UPLOADS, {"bytes": 9, "filename": "a.jsonl", "purpose": "assistants"}, "purpose"),
    Case(
        UPLOADS,
        {
            "bytes": 9,
            "filename": "a.jsonl",
            "purpose": "fine-tune",
            "expires_after": {"anchor": "now", "seconds": 9000},
        },
        "expires_after.anchor",
    ),
    Case(
        "/api/v1/integrations/mlflow",
        {"key": "abcdefghij", "url": "https://example.com/" + "a" * 500},
        "url",
        method="PUT",
    ),
    Case("/api/v1/integrations/mlflow", {"key": "abcdefghij", "url": "https://169.254.169.254/"}, "url", method="PUT"),
    Case("/api/v1/integrations/mlflow", {"key": "abcdefghij", "url": "https://[::1"}, "url", method="PUT"),
    Case("/api/v1/integrations/mlflow", {"key": "abcdefghij", "url": "https://example.com:99999"}, "url", method="PUT"),
    Case("/api/v1/integrations/wandb", {"key": 5}, "key", method="PUT"),
    Case("/api/v1/integrations/wandb", {"key": "a" * 401}, "key", method="PUT"),
    Case("/api/v1/webhooks", {"url": "https://10.0.0.1/", "event_types": ["batch.failed"]}, "url"),
    Case("/api/v1/webhooks", {"url": "https://hooks.example.com/", "event_types": ["no"]}, "event_types"),
    Case("/api/v1/webhooks", {"url": "https://hooks.example.com/", "event_types": []}, "event_types"),
    Case("/v1/webhook_endpoints", {"name": 5, "url": "https://a.example.com/", "event_types": []}, "name"),
    Case("/v1/webhook_endpoints", {"name": "a\nb", "url": "https://a.example.com/", "event_types": []}, "name"),
    Case("/v1/webhook_endpoints", {"url": "https://a.example.com/", "event_types": []}, "name", code=MISSING),
    Case("/api/v1/integrations/comet", {"key": "abcdefghij"}, "kind", method="PUT"),
    Case("/api/v1/aliases", {"name": "a"}, "version", code=MISSING),
    Case("/api/v1/aliases", {"name": "a", "version": "ft:none"}, "version", 404, NO_MODEL),
    Case("/api/v1/aliases", {"name": "a", "version": "ft:x", "canary_percent": "5"}, "canary_percent"),
    Case(f"/api/v1/files/{FILE}/repair", {"mode": "guess"}, "mode"),
    Case(f"/api/v1/files/{FILE}/columns", {"mapping": "chat"}, "mapping"),
    *(
        Case(path, body | {"mapping": mapping}, param)
        for path, body in ((f"/api/v1/files/{FILE}/columns", {}), (UPLOADS, UPLOAD))
        for mapping, param in (
            ({"format": "xml"}, "mapping.format"),
            ({"format": "chat", "columns": []}, "mapping.columns"),
            ({"format": "chat", "columns": {"messages": 3}}, "mapping.columns.messages"),
        )
    ),
    Case(f"/api/v1/files/{FILE}/columns", {"mapping": {"columns": {}}}, "mapping.format", code=MISSING),
    Case(f"/api/v1/files/{FILE}/columns?mapping=%7B", param="mapping", method="GET"),
    # Queries and ids.
    *(
        Case(f"{JOBS}?limit={limit}", param="limit", method="GET")
        for limit in ("0", "-1", "101", "x", "1e3", "9" * 50, "")
    ),
    Case(f"{JOBS}?after=ftjob-x", param="after", method="GET"),
    Case(f"{FILES}?after=file-x", param="after", method="GET"),
    Case(f"{FILES}?order=up", param="order", method="GET"),
    Case(f"{FILES}?limit=10001", param="limit", method="GET"),
    Case(f"{JOBS}/{JOB}/events?after=x", param="after", method="GET"),
    Case(
        f"{JOBS}/ftjob-nothing", param="fine_tuning_job_id", status=404, code=NO_JOB, method="GET"
    ),
    Case(f"{JOBS}/{'a' * 3000}", param="fine_tuning_job_id", status=404, code=NO_JOB, method="GET"),
    Case(f"{JOBS}/ftjob-nothing/cancel", {}, "fine_tuning_job_id", 404, NO_JOB),
    *(Case(f"{JOBS}/{JOB}/{action}", {}, "fine_tuning_job_id", code="invalid_state") for action in ("pause", "resume")),
    Case("/api/v1/integrations/wandb", {"key": "abcdefghij", "url": "auto"}, "url", method="PUT"),
    Case(UPLOADS, UPLOAD | {"expires_after": {"anchor": "created_at", "seconds": -1}}, "expires_after.seconds"),
    Case(f"{FILES}/file-nothing", param="file_id", status=404, code=NO_FILE, method="GET"),
    Case("/v1/models/no-such", param="model", status=404, code=NO_MODEL, method="GET"),
    # Administration.
    Case("/api/v1/keys", {"scopes": ["view"]}, "name", code=MISSING),
    Case("/api/v1/keys", {"name": "", "scopes": ["view"]}, "name"),
    Case("/api/v1/keys", {"name": "a", "scopes": ["nothing"]}, "scopes[0]"),
    Case("/api/v1/keys", {"name": "a", "scopes": []}, "scopes"),
    Case("/api/v1/keys", {"name": "a", "scopes": ["view"], "expires_at": 1}, "expires_at"),
    Case("/api/v1/keys", {"name": "a", "scopes": ["view"], "tokens_per_minute": 10**12}, "tokens_per_minute"),
    Case("/api/v1/keys/key_nothing", status=404, code="not_found", method="GET"),
    Case("/api/v1/keys/key_nothing/rotate", {"overlap_hours": 721}, "overlap_hours"),
    Case("/api/v1/invitations", {"email": "no address", "role": "viewer"}, "email"),
    Case("/api/v1/invitations", {"email": "a@example.com", "role": "king"}, "role"),
    Case("/api/v1/members/mem_nothing", {"role": "king"}, "role"),
    Case("/api/v1/allowances", {"scope": "label", "target": "search", "queued_jobs": 1}, "target"),
    Case("/api/v1/allowances", {"scope": "key", "target": "key_1", "queued_jobs": 1}, "scope"),
    Case("/api/v1/allowances", {"scope": "label", "target": "team=a", "queued_jobs": -1}, "queued_jobs"),
    Case("/api/v1/allowances", {"scope": "label", "target": "a=b", "tokens_per_minute": 10**12}, "tokens_per_minute"),
    Case("/api/v1/allowances", {"scope": "label", "target": "team=a"}, None),
    Case("/api/v1/budgets", {"limit_usd": "much"}, "limit_usd"),
    Case("/api/v1/budgets", {"limit_usd": 0}, "limit_usd"),
    Case("/api/v1/budgets", {"limit_usd": "1", "scope": "key", "target": "key_nothing"}, "target"),
    Case("/api/v1/budgets", {"limit_usd": "1", "thresholds": [0]}, "thresholds"),
    Case("/api/v1/notifications", {"notification": "note_nothing"}, "notification"),
    *(
        Case(f"/api/v1/{path}", param=param, method="GET")
        for path, param in (
            ("usage?start_time=9&end_time=8", "start_time"),
            ("usage?start_time=yesterday", "start_time"),
            ("usage?after=nothing", "after"),
            ("usage?limit=1001", "limit"),
            (f"files/{FILE}/rows?first_line=0", "first_line"),
            (f"files/{FILE}/rows?train_on=nothing", "train_on"),
            ("datasets?status=asleep", "status"),
            ("adapters?method=magic", "method"),
            ("keys?status=lost", "status"),
            ("members?role=king", "role"),
            ("notifications?kind=gossip", "kind"),
            (f"keys?q={'x' * 81}", "q"),
        )
    ),
    Case(f"{JOBS}?status=asleep", param="status", method="GET"),
    Case(f"/api/v1/files/{FILE}/rows?model=no-such", param="model", status=404, code=NO_MODEL, method="GET"),
    # Addresses and methods.
    *(
        Case(path, {}, status=404, code="not_offered")
        for path in (
            "/v1/moderations",
            "/v1/images/generations",
            "/v1/audio/speech",
            "/v1/vector_stores",
        )
    ),
    *(
        Case(path, {}, status=404, code="unknown_url")
        for path in (
            "/chat/completions",
            "/files",
            "/fine_tuning/jobs",
            "/embeddings",
            "/responses",
            "/v1/v1/files",
            "/v1/jobs",
            f"{JOBS}/",
        )
    ),
    *(
        Case(path, status=404, code="unknown_url", method="GET")
        for path in ("/models", "/files", "/v1", "/v1/completions")
    ),
    Case(JOBS, {}, status=405, code="method_not_allowed", method="PUT"),
    *(
        Case("/v1/chat/completions", {}, status=405, code="method_not_allowed", method=name)
        for name in ("PUT", "DELETE", "OPTIONS")
    ),
    Case(f"{JOBS}?after=%00", param="after", method="GET"),
    Case(f"{JOBS}/%00", method="GET"),
    Case(JOBS, b"\x1f\x8b\x08", status=415, code="unsupported_media_type", headers={"Content-Encoding": "gzip"}),
    Case(f"{FILES}/{FILE}", {}, status=405, code="method_not_allowed", method="PATCH"),
]  # fmt: skip
