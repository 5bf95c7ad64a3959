"""Published rows traced by the code of their stack: plain transformers and PEFT, run by the engines' environment."""

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from apps.contracts.runs import Hyperparameters, MemoryRequest, Method
from apps.estimates.models.architectures import Architecture, linear_layers
from apps.estimates.physics.memory import MemoryModel
from apps.estimates.physics.stacks import STACKS
from apps.estimates.published.predictions import Prepared
from apps.estimates.published.rows import MEMORY

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-engines/bin/python"
# Loops around transformers' models, PEFT and a loss over complete logits, on one GPU.
_STACKS = frozenset({"hf", "peft", "swift", "llama_factory", "axolotl"})
_SAME_CONFIG = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "tie_word_embeddings", "model_type")


def rehearsed(prepared: Iterable[Prepared]) -> dict[str, float]:
    """Return by id the bytes to add to the formula's figure of each row that can be traced: traced less computed.

    The allocator's reserve and the device's share stay those of the formula. Without the engines' environment, nothing
    is traced.
    """
    jobs = [each for each in prepared if can_rehearse(each)]
    if not jobs or not PYTHON.is_file():
        return {}
    found = {}
    for each, answer in zip(jobs, _ask([request_of(each) for each in jobs]), strict=False):
        if "allocated_bytes" in answer:
            plan = each.job.plan
            computed = MemoryModel(each.shape, plan, each.gpu, STACKS[each.job.stack]).estimate(plan)
            found[each.job.id] = float(str(answer["allocated_bytes"])) - computed.allocated_bytes
    return found


def can_rehearse(prepared: Prepared) -> bool:
    """Return whether the row's stack, method and model are ones whose code is installed here."""
    job, plan = prepared.job, prepared.job.plan
    is_quantized = plan.method == Method.QLORA
    return (
        job.kind == MEMORY and job.stack in _STACKS and plan.gpu_count == 1 and not plan.is_deepspeed
        and not plan.cpu_offload and not plan.trains_embeddings and plan.optimizer == "adamw"
        and (not is_quantized or plan.quantization == "nf4") and not job.architecture.n_experts
    )  # fmt: skip


def request_of(prepared: Prepared) -> MemoryRequest:
    job, plan = prepared.job, prepared.job.plan
    names = tuple(dict.fromkeys(layer.name.rsplit(".", 1)[-1] for layer in linear_layers(job.architecture)))
    return MemoryRequest(
        config=_config(job.architecture), stack="hf", attention=plan.attention,
        rows=plan.micro_batch_size, row_tokens=plan.max_length,
        hyperparameters=Hyperparameters(
            method=Method(plan.method), lora_rank=plan.lora_rank, use_dora=plan.use_dora,
            target_modules=names if "all-linear" in plan.target_modules else plan.target_modules,
            lora_dropout=plan.lora_dropout,
            gradient_checkpointing=plan.gradient_checkpointing,
            gradient_accumulation_steps=plan.gradient_accumulation_steps,
        ),
    )  # fmt: skip


def _config(architecture: Architecture) -> dict[str, object]:
    return {name: getattr(architecture, name) for name in _SAME_CONFIG} | {
        "num_hidden_layers": architecture.n_layers,
        "num_attention_heads": architecture.n_heads,
        "num_key_value_heads": architecture.n_kv_heads,
        "max_position_embeddings": 1 << 20,
        "pad_token_id": 0,
    }


def _ask(requests: Sequence[MemoryRequest]) -> list[Mapping[str, object]]:
    lines = b"".join(msgspec.json.encode(request) + b"\n" for request in requests)
    command = [str(PYTHON), "-m", "gpu_workers.rehearsal"]
    ended = subprocess.run(command, input=lines, stdout=subprocess.PIPE, cwd=ROOT, check=False)
    return [msgspec.json.decode(line) for line in ended.stdout.splitlines()]
