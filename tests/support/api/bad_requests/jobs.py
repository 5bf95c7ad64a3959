"""Wrong requests for fine-tuning jobs."""

from collections.abc import Iterable
from typing import Any

from tests.support.api.bad_requests import (
    FILE,
    JOBS,
    MISSING,
    UNKNOWN,
    Case,
)


def _job(param: str | None = None, code: str = "invalid_value", **fields: Any) -> Case:
    return Case(JOBS, {"model": "anneal-demo", "training_file": FILE, "dry_run": True} | fields, param, code=code)


def _jobs(param: str, **field: Iterable[Any]) -> list[Case]:
    [(name, values)] = field.items()
    return [_job(param, **{name: value}) for value in values]


def _pools(*names: str) -> list[Case]:
    return [_job("compute.pool", compute={"pool": name}) for name in names]


FOR_JOBS = [
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
    _job("recipe.lora_rank", recipe={"lora_rank": 1e308}),
    _job("recipe.lora_rank", recipe={"lora_rank": 1e308, "use_rslora": True}),
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
    _job("method.type", method={"type": "sft", "supervised": {}}),
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
        "recipe.epochs",
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}},
        recipe={"epochs": 3},
    ),
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
    _job("evaluation.grader", evaluation={"grader": {"type": "judge", "model": "no-such"}}),
]  # fmt: skip
