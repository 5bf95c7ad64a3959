"""Ask one rival about the rows on standard input: run by `rivals.py` with the Python that has the rival.

Each is asked through its own functions; a row outside what it models gets no line. Standard library only besides.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

GIB = 1024**3
Row = dict[str, Any]
_ROWS = 10_000_000  # so many samples that the hours ftuneai rounds to 0.01 are exact enough


def canifinetune(row: Row) -> Iterator[tuple[str, float]]:
    """One GPU, dense models; the total as shipped, headroom included, and its components without it."""
    from canifinetune.estimator.memory import EstimateRequest, estimate

    is_outside = row["gpu_count"] > 1 or row["dora"] or row["trains_embeddings"] or row["quantization"] != "nf4"
    if row["kind"] != "peak_memory" or is_outside or row["is_deepspeed"]:
        return
    override = {
        "hidden_size": row["hidden_size"], "num_hidden_layers": row["n_layers"],
        "num_attention_heads": row["n_heads"], "num_key_value_heads": row["n_kv_heads"],
        "intermediate_size": row["intermediate_size"], "vocab_size": row["vocab_size"], "family": "llama",
        "total_params": row["parameters"], "tie_word_embeddings": row["tied"],
    }  # fmt: skip
    request = EstimateRequest(
        model_id=f"row/{row['id']}", gpu_vram_gb=row["gpu_gib"], method=row["method"], seq_len=row["max_length"],
        micro_batch_size=row["micro_batch_size"], lora_rank=row["lora_rank"],
        lora_target_scope="all_linear" if row["is_all_linear"] else "attention",
        optimizer="adamw_8bit" if "8bit" in row["optimizer"] else "adamw_torch",
        gradient_checkpointing=row["checkpointing"],
        attention_implementation="eager" if row["attention"] == "eager" else "flash_attention_2",
        override=override, use_network=False,
    )  # fmt: skip
    memory = estimate(request).memory
    yield "canifinetune", memory.total_estimated_gb * GIB
    yield "canifinetune without headroom", (memory.total_estimated_gb - memory.safety_margin_gb) * GIB


def ftuneai(row: Row) -> Iterator[tuple[str, float]]:
    from ftuneai.core.memory import MemoryEstimator
    from ftuneai.core.models import (
        FineTuneMethod,
        GPUSpec,
        LoRATarget,
        ModelSpec,
        OptimizerType,
        ShardingStrategy,
        TrainingConfig,
    )
    from ftuneai.core.time import TimeEstimator

    model = ModelSpec(
        name=row["id"], parameters=row["parameters"], hidden_size=row["hidden_size"], num_layers=row["n_layers"],
        num_attention_heads=row["n_heads"], num_kv_heads=row["n_kv_heads"], vocab_size=row["vocab_size"],
        intermediate_size=row["intermediate_size"], max_seq_length=max(row["max_length"], 1),
    )  # fmt: skip
    sharding = {
        "zero1": ShardingStrategy.ZERO_1, "zero2": ShardingStrategy.ZERO_2,
        "zero3": ShardingStrategy.ZERO_3 if row["is_deepspeed"] else ShardingStrategy.FSDP,
    }.get(row["parallelism"], ShardingStrategy.NONE)  # fmt: skip
    target = LoRATarget.ATTENTION_ALL if row["modules"] >= 3 else LoRATarget.ATTENTION
    config = TrainingConfig(
        method=FineTuneMethod(row["method"]), batch_size=row["micro_batch_size"], seq_length=row["max_length"],
        gradient_checkpointing=row["checkpointing"], lora_rank=row["lora_rank"],
        optimizer=OptimizerType.ADAM_8BIT if "8bit" in row["optimizer"] else OptimizerType.ADAMW,
        lora_target=LoRATarget.ALL_LINEAR if row["is_all_linear"] else target,
        flash_attention=row["attention"] != "eager", sharding=sharding, num_gpus=row["gpu_count"],
    )  # fmt: skip
    if row["kind"] == "peak_memory":
        yield "ftuneai", MemoryEstimator(model, config).estimate().total_gb * GIB
        return
    if not row["tflops"]:
        return
    gpu = GPUSpec(
        name=row["gpu"], vram_gb=row["gpu_gib"], fp16_tflops=row["tflops"], bf16_tflops=row["tflops"],
        fp32_tflops=row["tflops"], memory_bandwidth_gbps=row["bandwidth_gb"],
    )  # fmt: skip
    hours = TimeEstimator(model, config).estimate(gpu, _ROWS, epochs=1, num_gpus=row["gpu_count"]).total_hours
    yield "ftuneai", hours * 3600 * row["gpu_count"] / (_ROWS * row["max_length"])


def accelerate(row: Row) -> Iterator[tuple[str, float]]:
    """`accelerate estimate-memory`: training with Adam of a model in 16-bit mixed precision; one GPU, no adapters."""
    from accelerate.commands.estimate import estimate_training_usage

    if row["kind"] == "peak_memory" and row["method"] == "full" and row["gpu_count"] == 1:
        yield "accelerate", float(max(estimate_training_usage(row["parameters"] * 4, "bfloat16").values()))


def deepspeed(row: Row) -> Iterator[tuple[str, float]]:
    """`estimate_zero2/3_model_states_mem_needs`: model states of full training under ZeRO."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if row["kind"] != "peak_memory" or row["method"] != "full":
        return
    if row["parallelism"] == "zero3":
        states = estimate_zero3_model_states_mem_needs(
            total_params=row["parameters"], largest_layer_params=row["largest_layer"],
            num_gpus_per_node=row["gpu_count"], cpu_offload=row["offload"], cpu_offload_params=row["offload"],
        )  # fmt: skip
    elif row["parallelism"] == "zero2":
        states = estimate_zero2_model_states_mem_needs(
            total_params=row["parameters"], num_gpus_per_node=row["gpu_count"], cpu_offload=row["offload"]
        )
    else:
        return
    yield "deepspeed", float(states[1])


RIVALS: dict[str, Callable[[Row], Iterator[tuple[str, float]]]] = {
    rival.__name__: rival for rival in (canifinetune, ftuneai, accelerate, deepspeed)
}


def main() -> None:
    rival = RIVALS[sys.argv[1]]
    for line in sys.stdin:
        row = json.loads(line)
        for name, value in rival(row):
            sys.stdout.write(json.dumps({"rival": name, "id": row["id"], "value": value}) + "\n")


if __name__ == "__main__":
    main()
