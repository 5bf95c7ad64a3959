"""The jobs of `make bench-rehearsal`: recipes on the catalogue's models, and small ones that a CPU can really train."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from apps.contracts.hyperparameters import Hyperparameters, Method, Objective
from apps.contracts.runs import MemoryRequest
from apps.estimates.models.architectures import Architecture, from_catalog_row, linear_layers
from apps.estimates.physics.plans import TrainingPlan

CATALOG = Path(__file__).resolve().parents[3] / "apps" / "catalog" / "data" / "models.json"
_TEXT_ONLY = {"gemma3": "gemma3_text"}
_SMALL: dict[str, object] = {
    "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 704, "tie_word_embeddings": True, "pad_token_id": 0
}  # fmt: skip
_SHAPES: tuple[tuple[str, dict[str, object]], ...] = (
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}),
    ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192}),
    ("gemma3_text", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 16384,
                     "sliding_window": 64}),
)  # fmt: skip
_PLAIN = {"gradient_checkpointing": True, "lora_dropout": 0.05}


class Case(NamedTuple):
    """One job; `row` is the catalogue's model, None for a small one."""

    name: str
    request: MemoryRequest
    row: dict[str, object] | None = None


# name, recipe, rows of a micro-step, tokens of a row, GPUs, how they share the job
_RECIPES: tuple[tuple[str, dict[str, object], int, int, int, str], ...] = (
    ("lora", {}, 1, 2048, 1, "single"),
    ("lora r64, 4 rows", {"lora_rank": 64}, 4, 1024, 1, "single"),
    ("lora attention only", {"target_modules": ("q_proj", "v_proj"), "lora_dropout": 0.0}, 2, 1024, 1, "single"),
    ("lora without checkpoints", {"gradient_checkpointing": False}, 1, 1024, 1, "single"),
    ("lora without checkpoints, 16 rows", {"gradient_checkpointing": False}, 16, 512, 1, "single"),
    ("lora, 8 rows", {}, 8, 2048, 1, "single"),
    ("lora, 8 rows, no dropout", {"lora_dropout": 0.0}, 8, 2048, 1, "single"),
    ("lora, 16,384 tokens", {"lora_dropout": 0.0}, 1, 16384, 1, "single"),
    ("qlora", {"method": Method.QLORA}, 1, 2048, 1, "single"),
    ("qlora without checkpoints", {"method": Method.QLORA, "gradient_checkpointing": False}, 1, 1024, 1, "single"),
    ("qlora, 8 rows", {"method": Method.QLORA}, 8, 2048, 1, "single"),
    ("dora", {"use_dora": True}, 1, 1024, 1, "single"),
    ("dora without checkpoints, 4 rows", {"use_dora": True, "gradient_checkpointing": False}, 4, 1024, 1, "single"),
    ("full", {"method": Method.FULL}, 1, 2048, 1, "single"),
    ("full, 8 rows", {"method": Method.FULL}, 8, 2048, 1, "single"),
    ("full, 8 rows twice a step", {"method": Method.FULL, "gradient_accumulation_steps": 2}, 8, 2048, 1, "single"),
    ("full without checkpoints, 8 rows", {"method": Method.FULL, "gradient_checkpointing": False}, 8, 512, 1, "single"),
    ("dpo", {"objective": Objective.DPO}, 1, 1024, 1, "single"),
    ("dpo, 4 pairs", {"objective": Objective.DPO}, 4, 1024, 1, "single"),
    ("lora on 4 GPUs, whole on each", {}, 1, 2048, 4, "ddp"),
    ("full on 8 GPUs, whole on each", {"method": Method.FULL}, 1, 2048, 8, "ddp"),
    ("lora on 4 GPUs, sharded", {}, 1, 2048, 4, "fsdp"),
    ("full on 8 GPUs, sharded", {"method": Method.FULL}, 1, 2048, 8, "fsdp"),
    ("full on 8 GPUs, sharded, 8 rows", {"method": Method.FULL}, 8, 2048, 8, "fsdp"),
)  # fmt: skip


def catalog_cases() -> list[Case]:
    """Return every recipe on every model of the catalogue, in a random order that is always the same."""
    rows = msgspec.json.decode(CATALOG.read_bytes())["models"]
    cases = [
        Case(f"{row['name']}: {name}", _request(row, recipe, *rest), row)
        for row in rows
        for name, recipe, *rest in _RECIPES
        if not (row.get("n_experts") and "target_modules" not in recipe)
    ]
    random.Random(0).shuffle(cases)
    return cases


def small_cases() -> Iterator[Case]:
    """Yield jobs that a CPU trains in a second."""
    recipes: tuple[tuple[str, dict[str, object], int, int], ...] = (
        ("lora", {}, 2, 128),
        ("lora, dropout", {"lora_dropout": 0.1}, 2, 128),
        ("lora, checkpoints", {"gradient_checkpointing": True}, 1, 512),
        ("lora, accumulation", {"gradient_accumulation_steps": 2}, 2, 128),
        ("lora, long", {"lora_rank": 8}, 1, 1024),
        ("lora, attention only", {"target_modules": ("q_proj", "v_proj")}, 2, 256),
        ("lora, padded", {"packing": False}, 3, 128),
        ("rslora", {"use_rslora": True, "lora_rank": 64}, 1, 256),
        ("dora", {"use_dora": True}, 2, 128),
        ("dora, checkpoints", {"use_dora": True, "gradient_checkpointing": True}, 2, 128),
        ("qlora", {"method": Method.QLORA}, 2, 128),
        ("qlora, checkpoints", {"method": Method.QLORA, "gradient_checkpointing": True}, 1, 512),
        ("full", {"method": Method.FULL}, 2, 128),
        ("full, checkpoints", {"method": Method.FULL, "gradient_checkpointing": True}, 1, 512),
        ("dpo", {"objective": Objective.DPO}, 2, 64),
        ("orpo", {"objective": Objective.ORPO}, 2, 64),
    )
    for kind, sizes in _SHAPES:
        config = _SMALL | {"model_type": kind} | sizes
        for name, recipe, rows, tokens in recipes:
            made = Hyperparameters(**({"lora_dropout": 0.0} | recipe))  # type: ignore[arg-type]
            request = MemoryRequest(
                config=config, hyperparameters=made, rows=rows, row_tokens=tokens, trained_share=0.5, is_on_cpu=True
            )
            yield Case(f"{kind}: {name}", request)


def shared_cases() -> Iterator[Case]:
    """Yield small jobs whose model two processes share."""
    recipes: tuple[tuple[str, dict[str, object], int, int], ...] = (
        ("lora", {}, 2, 128),
        ("lora, checkpoints", {"gradient_checkpointing": True}, 1, 512),
        ("full", {"method": Method.FULL}, 2, 128),
        ("full, checkpoints", {"method": Method.FULL, "gradient_checkpointing": True}, 1, 512),
    )
    for name, recipe, rows, tokens in recipes:
        for is_tied in (True, False):
            request = MemoryRequest(
                config=_SMALL | _SHAPES[0][1] | {"model_type": _SHAPES[0][0], "tie_word_embeddings": is_tied},
                hyperparameters=Hyperparameters(**({"lora_dropout": 0.0} | recipe)),  # type: ignore[arg-type]
                rows=rows, row_tokens=tokens, trained_share=0.5, is_on_cpu=True, gpu_count=2, parallelism="fsdp",
            )  # fmt: skip
            yield Case(f"{name} on 2 processes, {'tied' if is_tied else 'untied'} head", request)


def catalog_config(row: dict[str, object]) -> dict[str, object]:
    """Return a config.json of the row's dimensions."""
    kind = _TEXT_ONLY.get(str(row["model_type"]), str(row["model_type"]))
    config = {
        "model_type": kind, "num_hidden_layers": row["n_layers"], "hidden_size": row["hidden_size"],
        "num_attention_heads": row["n_heads"], "num_key_value_heads": row["n_kv_heads"],
        "head_dim": row["head_dim"], "vocab_size": row["vocab_size_padded"], "pad_token_id": 0,
        "intermediate_size": row.get("intermediate_size") or row.get("moe_intermediate_size"),
        "tie_word_embeddings": row["tie_word_embeddings"], "max_position_embeddings": 131072,
    }  # fmt: skip
    if row.get("n_experts"):
        is_local = kind in ("mixtral", "gpt_oss")
        config["num_local_experts" if is_local else "num_experts"] = row["n_experts"]
        config["num_experts_per_tok"] = row["experts_per_token"]
        config["moe_intermediate_size"] = row.get("moe_intermediate_size") or config["intermediate_size"]
        if is_local:
            config["intermediate_size"] = config["moe_intermediate_size"]
    return config


def plan_of(request: MemoryRequest, architecture: Architecture) -> TrainingPlan:
    """Return the request as the formula's plan."""
    recipe = request.hyperparameters
    names = {layer.name.rsplit(".", 1)[-1] for layer in linear_layers(architecture)}
    is_packed = not (recipe.objective.is_preference or architecture.has_own_attention)
    return TrainingPlan(
        method=recipe.method, max_length=request.row_tokens, lora_rank=recipe.lora_rank,
        target_modules=tuple(name for name in recipe.target_modules if name in names),
        micro_batch_size=request.rows, gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        gradient_checkpointing=recipe.gradient_checkpointing, lora_dropout=recipe.lora_dropout,
        use_dora=recipe.use_dora, is_packed=is_packed, gpu_count=request.gpu_count,
        parallelism="zero3" if request.parallelism == "fsdp" else request.parallelism,
        attention="eager" if architecture.has_own_attention else "flash",
        is_preference=recipe.objective.is_preference, has_reference=recipe.objective is Objective.DPO,
    )  # fmt: skip


def _request(
    row: dict[str, object], recipe: dict[str, object], rows: int, tokens: int, gpus: int, parallelism: str
) -> MemoryRequest:
    names = {layer.name for layer in linear_layers(from_catalog_row(row)) if "expert" not in layer.name}
    targets = {"target_modules": tuple(sorted(name.rsplit(".", 1)[-1] for name in names))}
    if "target_modules" in recipe:
        targets = {"target_modules": tuple(name for name in names if name in ("q_proj", "v_proj", "qkv_proj"))}
    return MemoryRequest(
        config=catalog_config(row), hyperparameters=Hyperparameters(**(_PLAIN | recipe | targets)),  # type: ignore[arg-type]
        rows=rows, row_tokens=tokens, gpu_count=gpus, parallelism=parallelism,
    )  # fmt: skip
