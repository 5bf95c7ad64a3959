"""Wrong requests to the public API: body, jobs, estimates, uploads, queries, addresses."""

from collections.abc import Iterable
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


def _job(param: str | None = None, code: str = "invalid_value", **fields: Any) -> Case:
    return Case(JOBS, {"model": "anneal-demo", "training_file": FILE, "dry_run": True} | fields, param, code=code)


def _jobs(param: str, **field: Iterable[Any]) -> list[Case]:
    [(name, values)] = field.items()
    return [_job(param, **{name: value}) for value in values]


def _pools(*names: str) -> list[Case]:
    return [_job("compute.pool", compute={"pool": name}) for name in names]


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
    # Jobs: what is required, what is unknown, of which type.
    Case(JOBS, {}, "training_file", code=MISSING),
    Case(JOBS, {"training_file": FILE}, "model", code=MISSING),
    Case(JOBS, {"model": "anneal-demo"}, "training_file", code=MISSING),
    *(
        Case(JOBS, {"model": "anneal-demo", "training_file": FILE} | {name: value}, name)
        for name, value in {
            "model": 3,
            "training_file": None,
            "validation_file": 7,
            "suffix": 5,
            "seed": "x",
            "metadata": [],
            "integrations": {},
            "hyperparameters": 3,
            "method": "dpo",
            "lora": [],
            "quantization": 4,
            "recipe": "fast",
            "evaluation": "yes",
            "exports": "gguf",
            "compute": "h100",
            "budget": 5,
            "dry_run": "yes",
            "needed_by": [],
        }.items()
    ),
    *(
        _job(name, UNKNOWN, **{name: 3})
        for name in ("n_epochs", "learning_rate", "base_model", "trainingFile", "stream")
    ),
    # Keys that look like the words of a parser's own error.
    *(
        Case(JOBS, {key: value}, key, code=UNKNOWN)
        for key in ("x` - at `$[0]", "x` - at `$.model.z", "x` - at `$[...]", "x - at `$", "`", " ")
        for value in (3, "text", {"a": "b"})
    ),
    Case(JOBS, {"": 1}, "", code=UNKNOWN),
    _job("lora.x` - at `$.lora", UNKNOWN, lora={"x` - at `$.lora": 1}),
    _job("metadata.` - at `$[0]", metadata={"` - at `$[0]": 1}),
    _job("lora.r", UNKNOWN, lora={"r": 8}),
    _job("lora.rank", lora={"rank": "8"}),
    _job("lora.rank", lora={"rank": 0}),
    _job("lora.rank", lora={"rank": 7}),
    _job("lora.alpha", lora={"alpha": 10**9}),
    _job("lora.alpha", lora={"rank": 8, "alpha": 1024}),
    _job("lora.dropout", lora={"dropout": 2.0}),
    _job("lora.dropout", lora={"dropout": "none"}),
    _job("lora.target_modules", lora={"target_modules": ["lm_head"]}),
    _job("lora.target_modules[1]", lora={"target_modules": ["q_proj", 3]}),
    _job("lora.use_dora", lora={"use_dora": "yes"}),
    _job("recipe.use_dora", recipe={"use_dora": "yes"}),
    _job("recipe.use_dora", recipe={"method": "full", "use_dora": True}),
    _job("recipe.packing", recipe={"packing": 3}),
    _job("recipe.cpu_offload", recipe={"cpu_offload": 1}),
    _job("recipe.target_modules", recipe={"target_modules": "q_proj"}),
    _job("recipe.target_modules", recipe={"target_modules": [None]}),
    _job("recipe.r", recipe={"r": 8}),
    _job("recipe.epochs", recipe={"epochs": 0}),
    _job("recipe.epochs", recipe={"epochs": 1.5}),
    _job("recipe.learning_rate", recipe={"learning_rate": 0}),
    _job("recipe.learning_rate", recipe={"learning_rate": "fast"}),
    _job("recipe.lr_scheduler", recipe={"lr_scheduler": "magic"}),
    _job("recipe.train_on", recipe={"train_on": ["x"]}),
    _job("recipe.max_length", recipe={"max_length": 2**40}),
    _job("recipe.seed", recipe={"seed": -5}),
    _job("recipe.method", recipe={"method": "magic"}),
    _job("recipe.method", recipe={"method": "kto"}),
    _job("recipe.method", recipe={"method": {}}),
    _job("recipe.validation_share", recipe={"validation_share": 0.99}),
    _job("hyperparameters.n_epochs", hyperparameters={"n_epochs": 0}),
    _job("hyperparameters.n_epochs", hyperparameters={"n_epochs": "many"}),
    _job("hyperparameters.n_epochs", hyperparameters={"n_epochs": 2**62}),
    _job("hyperparameters.n_epochs", hyperparameters={"n_epochs": True}),
    _job("hyperparameters.batch_size", hyperparameters={"batch_size": 0}),
    _job("hyperparameters.learning_rate_multiplier", hyperparameters={"learning_rate_multiplier": -1}),
    _job("hyperparameters.learning_rate_multiplier", hyperparameters={"learning_rate_multiplier": 1001}),
    _job("hyperparameters.epochs", UNKNOWN, hyperparameters={"epochs": 3}),
    _job("method.type", method={"type": "reinforcement"}),
    _job("method.type", method={"type": "reinforcement", "reinforcement": {"grader": {}}}),
    _job("method.type", method={"type": "kto"}),
    _job("method.type", method={"type": 3}),
    _job("method.grpo", UNKNOWN, method={"type": "supervised", "grpo": {}}),
    _job("method.dpo", method={"type": "supervised", "dpo": {}}),
    _job("method.supervised", method={"type": "dpo", "supervised": {"hyperparameters": {"n_epochs": 2}}}),
    _job(
        "method.supervised.hyperparameters.n_epochs",
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 0}}},
    ),
    _job(
        "method.supervised.hyperparameters.epochs",
        UNKNOWN,
        method={"type": "supervised", "supervised": {"hyperparameters": {"epochs": 2}}},
    ),
    _job("method.supervised.n_epochs", UNKNOWN, method={"type": "supervised", "supervised": {"n_epochs": 2}}),
    # Two fields for one value.
    _job("recipe.epochs", hyperparameters={"n_epochs": 2}, recipe={"epochs": 5}),
    _job("recipe.batch_size", hyperparameters={"batch_size": 2}, recipe={"batch_size": 4}),
    _job("recipe.seed", seed=6, recipe={"seed": 5}),
    _job("recipe.lora_rank", lora={"rank": 8}, recipe={"lora_rank": 16}),
    _job("recipe.learning_rate", hyperparameters={"learning_rate_multiplier": 2}, recipe={"learning_rate": 1e-4}),
    _job(
        "method.supervised.hyperparameters.n_epochs",
        hyperparameters={"n_epochs": 3},
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}},
    ),
    _estimate("recipe.lora_rank", lora={"rank": 8}, recipe={"lora_rank": 16}),
    _job("quantization", quantization="int3"),
    _job("quantization", quantization="nf4", recipe={"method": "lora"}),
    *_jobs("suffix", suffix=["!", "-", "a" * 65, "日本"]),
    *_jobs("seed", seed=[-1, 2**31, 1.5]),
    _job("metadata.k", metadata={"a": "b", "k": 3}),
    _job("metadata.k", metadata={"k": None}),
    _job("metadata", metadata={str(n): "x" for n in range(17)}),
    _job("metadata", metadata={"k": "x" * 513}),
    _job("evaluation.grader.type", evaluation={"grader": {"type": "bot"}}),
    _job("evaluation.grader", evaluation={"grader": {"type": "regex", "pattern": "a{99999999999}"}}),
    _job("evaluation.grader", evaluation={"grader": {"type": "regex", "pattern": "("}}),
    _job("evaluation.grader", evaluation={"grader": {"type": "regex", "pattern": "(?i)" + "[!-\uffff]" * 100}}),
    _job("evaluation.grader", evaluation={"grader": {"type": "regex", "pattern": "(" * 5000}}),
    _job("evaluation.grader", evaluation={"grader": {"type": "string_check", "operation": "is"}}),
    _job("evaluation.grader.kind", UNKNOWN, evaluation={"grader": {"kind": "regex"}}),
    _job("evaluation.rows", UNKNOWN, evaluation={"rows": 3}),
    _job("evaluation.max_rows", evaluation={"max_rows": 0}),
    _job("evaluation.max_rows", evaluation={"max_rows": 10**6}),
    _job("exports[0]", exports=["onnx"]),
    _job("exports[1]", exports=["gguf", 3]),
    _job("compute.gpu", UNKNOWN, compute={"gpu": "h100"}),
    _job("compute.gpu_count", compute={"gpu_count": 0}),
    _job("compute.gpu_count", compute={"gpu_count": "two"}),
    *_pools("no-such-pool", "x:" + "9" * 5000, "x:²", "x:٣", "x:0", "x:-1", "x:1000", "x:", ":", "x:1:1", "x\n:1 "),
    _job("compute.gpu_count", compute={"pool": "x:2", "gpu_count": 3}),
    _job("budget.spend_cap_usd", UNKNOWN, budget={"spend_cap_usd": "0.2"}),
    _job("budget.max_cost_usd", budget={"max_cost_usd": "cheap"}),
    _job("budget.max_cost_usd", budget={"max_cost_usd": []}),
    _job("budget.quoted_max_usd", budget={"quoted_max_usd": "cheap"}),
    _job("budget.max_cost_usd", budget={"max_cost_usd": -1}),
    *(
        _job("budget.max_cost_usd", budget={"max_cost_usd": amount})
        for amount in ("NaN", "1_0", "\u0663", " 1", "1\n", "+1", "1e1", "")
    ),
    _job("budget.max_cost_usd", budget={"max_cost_usd": "1e999"}),
    _job("integrations[0]", integrations=[3]),
    _job("integrations[0].type", integrations=[{"type": "web_search"}]),
    _job("integrations[0].type", MISSING, integrations=[{}]),
    _job("integrations[0].type", integrations=[{"type": 3}]),
    _job("integrations[0].type", integrations=[{"type": ["wandb"]}]),
    _job("integrations[0].wandb", integrations=[{"type": "wandb", "wandb": {}}]),
    _job("integrations[0].project", integrations=[{"type": "wandb", "project": "p"}]),
    *_jobs("needed_by", needed_by=["tomorrow", 1, 2**62, "9999-99-99T00:00:00Z", "2030-05-01T17:45:00"]),
    # Estimates and what else takes JSON.
    Case(ESTIMATES, {"model": "anneal-demo"}, "training_file", code=MISSING),
    Case(ESTIMATES, {"model": "no-such", "training_file": FILE}, "model", 404, NO_MODEL),
    Case(ESTIMATES, {"model": "anneal-demo", "training_file": "file-x"}, "training_file", 404, NO_FILE),
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
    _job("evaluation.grader", evaluation={"grader": {"type": "judge", "model": "no-such"}}),
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
