"""Wrong requests about what is kept: batches, evals, graders, stored completions, adapters, service accounts."""

from typing import Any

from tests.support.api.bad_requests import ESTIMATES, FILE, JOBS, MISSING, NO_FILE, NO_MODEL, UNKNOWN, Case

EVALS, BATCHES, COMPLETIONS, ACCOUNTS = "/v1/evals", "/v1/batches", "/v1/chat/completions", "/api/v1/service-accounts"
GRADERS = "/v1/fine_tuning/alpha/graders"
CONFIG = {"type": "custom", "item_schema": {"type": "object"}}
EXACT = {"type": "string_check", "name": "n", "input": "{{item.a}}", "reference": "a", "operation": "eq"}
CLOSE = {"type": "text_similarity", "name": "n", "input": "a", "reference": "b", "evaluation_metric": "bleu"}
ASKED = [{"role": "user", "content": "{{item.a}}"}]
LABEL = {
    "type": "label_model", "name": "n", "model": "anneal-demo", "input": ASKED, "labels": ["a"],
    "passing_labels": ["a"],
}  # fmt: skip
SCORE = {"type": "score_model", "name": "n", "model": "anneal-demo", "input": ASKED}
BATCH = {"input_file_id": FILE, "endpoint": "/v1/chat/completions", "completion_window": "24h"}


def _eval(param: str | None, code: str = "invalid_value", **fields: Any) -> Case:
    return Case(EVALS, {"data_source_config": CONFIG, "testing_criteria": [EXACT]} | fields, param, code=code)


def _criterion(param: str, code: str = "invalid_value", **criterion: Any) -> Case:
    return _eval(f"testing_criteria[0].{param}", code, testing_criteria=[criterion])


def _grader(param: str, code: str = "invalid_value", **grader: Any) -> Case:
    return Case(f"{GRADERS}/validate", {"grader": grader}, f"grader.{param}", code=code)


LONG = "x" * 50_000

KEPT = [
    # Long names, which no message repeats whole.
    *(Case(path, {"model": f"{start}{LONG}", "training_file": FILE}, "model", 404, code) for path, start, code in (
        (ESTIMATES, "", NO_MODEL), (JOBS, "", NO_MODEL), (JOBS, "ft:", NO_MODEL),
        (JOBS, "ftckpt_", "checkpoint_not_found"),
    )),
    Case(JOBS, {"model": "anneal-demo", "training_file": LONG}, "training_file", 404, NO_FILE),
    Case(BATCHES, BATCH | {"endpoint": LONG}, "endpoint"),
    Case(ACCOUNTS, {"name": "n", "role": LONG}, "role"),
    Case("/api/v1/budgets", {"limit_usd": LONG}, "limit_usd"),
    Case("/api/v1/budgets", {"limit_usd": "1", "scope": LONG}, "scope"),
    Case("/api/v1/webhooks", {"url": f"https://{LONG}", "event_types": [LONG]}, "url"),
    Case("/api/v1/integrations/wandb", {"key": LONG}, "key", method="PUT"),
    Case(f"/v1/models/ft:{LONG[:2000]}", param="model", status=404, code=NO_MODEL, method="GET"),
    Case(JOBS, {"model": "anneal-demo", "training_file": FILE, "suffix": LONG}, "suffix"),
    Case(JOBS, {"model": "anneal-demo", "training_file": FILE, "quantization": LONG}, "quantization"),
    Case(JOBS, {"model": "anneal-demo", "training_file": FILE, "method": {"type": LONG}}, "method.type"),
    Case(JOBS, {"model": "anneal-demo", "training_file": FILE, "compute": {"pool": LONG}}, "compute.pool"),
    Case(JOBS, {"model": "anneal-demo", "training_file": FILE, "integrations": [{"type": LONG}]},
         "integrations[0].type"),
    Case(JOBS, {"model": "anneal-demo", "training_file": FILE, "integrations": [{"type": "wandb", LONG: 1}]},
         f"integrations[0].{LONG[:128]}"),
    Case(JOBS, {"model": "anneal-demo", "training_file": FILE, "recipe": {LONG: 1}}, f"recipe.{LONG}"[:200]),
    *(Case(f"{GRADERS}/validate",
           {"grader": {"type": "multi", "name": "n", "graders": {LONG: grader}, "calculate_output": "a"}},
           f"grader.graders.{LONG}"[:200], code=code)
      for grader, code in (({}, MISSING), ({"type": "string_check"}, MISSING), (EXACT | {"a": 1}, UNKNOWN))),
    # Evals.
    Case(EVALS, {}, "data_source_config", code=MISSING),
    _eval("data_source_config.type", data_source_config={"type": "files"}),
    _eval("data_source_config.type", MISSING, data_source_config={}),
    _eval("data_source_config.item_schema", data_source_config=CONFIG | {"item_schema": 3}),
    _eval("data_source_config", data_source_config=CONFIG | {"item_schema": {"a": "x" * 20_000}}),
    _eval("testing_criteria", testing_criteria=[]),
    _eval("testing_criteria", testing_criteria=[EXACT] * 11),
    _eval("testing_criteria", testing_criteria=None),
    _eval("testing_criteria[0].type", testing_criteria=[{"type": "vibes"}]),
    _eval("name", name="n" * 201),
    _eval("metadata", metadata={"k" * 65: "v"}),
    _eval("metadata", metadata={f"k{number}": "v" for number in range(17)}),
    _eval("metadata.k", metadata={"k": 3}),
    _eval("share", UNKNOWN, share=True),
    _criterion("operation", **EXACT | {"operation": "about"}),
    _criterion("input", **EXACT | {"input": "x" * 8_001}),
    _criterion("input", **EXACT | {"input": "{{item.a}}" * 101}),
    _criterion("type", "not_offered", type="python", name="n", source="print(1)"),
    _criterion("evaluation_metric", "not_offered", **CLOSE | {"evaluation_metric": "cosine"}),
    _criterion("evaluation_metric", **CLOSE | {"evaluation_metric": "magic"}),
    _criterion("pass_threshold", **CLOSE | {"pass_threshold": "high"}),
    _criterion("passing_labels", **LABEL | {"passing_labels": ["b"]}),
    _criterion("labels", **LABEL | {"labels": []}),
    _criterion("model", **LABEL | {"model": "no-such"}),
    _criterion("input[0].role", **LABEL | {"input": [{"role": "king", "content": "a"}]}),
    _criterion("input", **LABEL | {"input": []}),
    _criterion("range", **SCORE | {"range": [1, 0]}),
    _criterion("range", **SCORE | {"range": [1]}),
    _criterion("sampling_params", "not_offered", **SCORE | {"sampling_params": {"temperature": 1}}),
    *(Case(f"{EVALS}?{query}", param=query.partition("=")[0], method="GET") for query in (
        "order=sideways", "order_by=name", "limit=0", "limit=101", "after=eval_nothing",
    )),
    Case(f"{EVALS}/eval_nothing", param="eval_id", status=404, code="eval_not_found", method="GET"),
    Case(f"{EVALS}/eval_nothing/runs", {"data_source": {"type": "jsonl", "source": {"type": "file_id", "id": "x"}}},
         "eval_id", 404, "eval_not_found"),
    *(
        Case(f"{EVALS}/eval_nothing/runs", body, param, code=code)
        for body, param, code in (
            ({}, "data_source", MISSING),
            ({"data_source": {"type": "video"}}, "data_source.type", "invalid_value"),
            ({"data_source": {"type": "jsonl"}}, "data_source.source", MISSING),
            ({"data_source": {"type": "jsonl", "source": {"type": "tape"}}}, "data_source.source.type",
             "invalid_value"),
            ({"data_source": {"type": "jsonl", "source": {"type": "file_content", "content": []}}},
             "data_source.source.content", "invalid_value"),
            ({"data_source": {"type": "completions", "source": {"type": "file_id", "id": "x"},
                              "sampling_params": {"temperature": 3}}},
             "data_source.sampling_params.temperature", "invalid_value"),
            ({"data_source": {"type": "completions", "source": {"type": "stored_completions", "limit": 0}}},
             "data_source.source.limit", "invalid_value"),
            ({"data_source": {"type": "completions", "source": {"type": "file_id", "id": "x"},
                              "input_messages": {"type": "item_reference", "item_reference": "sample.a"}}},
             "data_source.input_messages.item_reference", "invalid_value"),
        )
    ),
    # Graders.
    _grader("type", type="vibes"),
    _grader("calculate_output", type="multi", name="n", graders={"a": EXACT}, calculate_output="a +"),
    _grader("calculate_output", type="multi", name="n", graders={"a": EXACT}, calculate_output="__import__('os')"),
    _grader("calculate_output", type="multi", name="n", graders={"a": EXACT}, calculate_output="(" * 500),
    _grader("graders", type="multi", name="n", graders={}, calculate_output="1"),
    _grader("graders.a.type", "not_offered", type="multi", name="n", graders={"a": {"type": "python"}},
            calculate_output="a"),
    Case(f"{GRADERS}/run", {"grader": EXACT}, "model_sample", code=MISSING),
    Case(f"{GRADERS}/run", {"grader": EXACT, "model_sample": "x" * 8_001, "item": {}}, "model_sample"),
    # Batches.
    Case(BATCHES, {}, "input_file_id", code=MISSING),
    Case(BATCHES, BATCH | {"endpoint": "/v1/embeddings"}, "endpoint"),
    Case(BATCHES, BATCH | {"completion_window": "1h"}, "completion_window"),
    Case(BATCHES, BATCH | {"input_file_id": "file-nothing"}, "input_file_id", 404, NO_FILE),
    Case(BATCHES, BATCH | {"metadata": {"k": "v" * 513}}, "metadata"),
    Case(BATCHES, BATCH | {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
         "output_expires_after.seconds"),
    Case(f"{BATCHES}/batch_nothing", param="batch_id", status=404, code="batch_not_found", method="GET"),
    Case(f"{BATCHES}/batch_nothing/cancel", {}, "batch_id", 404, "batch_not_found"),
    # Stored completions.
    *(Case(f"{COMPLETIONS}?{query}", param=query.partition("=")[0], method="GET") for query in (
        "order=sideways", "limit=x", "after=chatcmpl-nothing",
    )),
    Case(f"{COMPLETIONS}/chatcmpl-nothing", param="completion_id", status=404, code="completion_not_found",
         method="GET"),
    Case(f"{COMPLETIONS}/chatcmpl-nothing", {}, "metadata", code=MISSING),
    Case("/api/v1/datasets", {"name": "n", "stored_completions": {"model": 3}}, "stored_completions.model"),
    Case("/api/v1/datasets", {"name": "n", "stored_completions": {"model": "none"}}, "stored_completions"),
    # Service accounts.
    Case(ACCOUNTS, {"role": "member"}, "name", code=MISSING),
    Case(ACCOUNTS, {"name": "n", "role": "king"}, "role"),
    Case(ACCOUNTS, {"name": " ", "role": "member"}, "name"),
    Case(ACCOUNTS, {"name": "n" * 81, "role": "member"}, "name"),
    Case(f"{ACCOUNTS}/mem_nothing", status=404, code="not_found", method="GET"),
    Case(f"{ACCOUNTS}/mem_nothing/keys", {"name": "n", "scopes": ["view"]}, status=404, code="not_found"),
]  # fmt: skip
