"""Published rows traced by the code of their stack: plain transformers and PEFT, run by the engines' environment."""

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.contracts.runs import MemoryRequest
from apps.estimates.models.architectures import Architecture, linear_layers
from apps.estimates.physics.memory import MemoryModel
from apps.estimates.physics.stacks import STACKS
from apps.estimates.published.predictions import Prepared
from apps.estimates.published.rows import MEMORY

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-engines/bin/python"
# Loops around transformers' models, PEFT and a loss over complete logits, on one GPU.
_STACKS = frozenset({"hf", "peft", "swift", "llama_factory", "axolotl"})
_MOST_WORDS = 100  # characters of a failed trace's message
_ENDED = {"error": "the process ended"}
_SAME_CONFIG = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "tie_word_embeddings", "model_type")


class Rehearsed(msgspec.Struct, frozen=True):
    """What the traces found, by row: bytes to add to the formula's figure, or why the formula's figure stays."""

    more_bytes: dict[str, float]
    kept: dict[str, str]


def rehearsed(prepared: Iterable[Prepared]) -> Rehearsed:
    """Trace each row of memory whose stack's code is installed here: traced less computed are the bytes to add.

    The allocator's reserve and the device's share stay those of the formula.
    """
    rows = [each for each in prepared if each.job.kind == MEMORY]
    kept = {each.job.id: reason for each in rows if (reason := _obstacle(each))}
    jobs = [each for each in rows if each.job.id not in kept]
    answers = _ask([request_of(each) for each in jobs])
    found = {}
    for index, each in enumerate(jobs):
        answer = answers[index] if index < len(answers) else _ENDED
        if "allocated_bytes" in answer:
            plan = each.job.plan
            computed = MemoryModel(each.shape, plan, each.gpu, STACKS[each.job.stack]).estimate(plan)
            found[each.job.id] = float(str(answer["allocated_bytes"])) - computed.allocated_bytes
        else:
            kept[each.job.id] = f"the trace failed: {str(answer['error'])[:_MOST_WORDS]}"
    return Rehearsed(found, kept)


def _obstacle(prepared: Prepared) -> str:
    """Return why the row cannot be traced, "" if it can."""
    job, plan = prepared.job, prepared.job.plan
    checks = (
        (PYTHON.is_file(), f"there is no environment with the engines ({PYTHON.relative_to(ROOT)})"),
        (job.stack in _STACKS, f"the code of {STACKS[job.stack].name} is not installed"),
        (job.architecture.model_type != "qwen", "the model's code is its publisher's, not that of transformers"),
        (not job.architecture.n_experts, "transformers 5 stores a mixture's experts otherwise than published runs"),
        (plan.gpu_count == 1 and not plan.is_deepspeed, "several GPUs or DeepSpeed"),
        (not (plan.cpu_offload or plan.offloads_activations), "the trace has one memory, not the host's and the GPU's"),
        (not plan.trains_embeddings, "an adapter that trains the embeddings too"),
        (plan.optimizer == "adamw" and not plan.steps_in_backward, "another optimizer than AdamW"),
        (not plan.is_compiled, "torch.compile"),
        (plan.method != Method.QLORA or plan.quantization == "nf4", "another quantization than NF4"),
    )
    return next((reason for holds, reason in checks if not holds), "")


def request_of(prepared: Prepared) -> MemoryRequest:
    job, plan = prepared.job, prepared.job.plan
    names = tuple(dict.fromkeys(layer.name.rsplit(".", 1)[-1] for layer in linear_layers(job.architecture)))
    return MemoryRequest(
        config=_config(job.architecture), stack=job.stack, attention=plan.attention,
        rows=plan.micro_batch_size, row_tokens=plan.max_length,
        hyperparameters=Hyperparameters(
            method=Method(plan.method), lora_rank=plan.lora_rank, use_dora=plan.use_dora,
            target_modules=names if "all-linear" in plan.target_modules else plan.target_modules,
            lora_dropout=plan.lora_dropout,
            gradient_checkpointing=plan.gradient_checkpointing,
            gradient_accumulation_steps=plan.gradient_accumulation_steps, packing=plan.is_packed,
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
    """Return the answers in the requests' order: all of them, unless the process is ended."""
    if not requests:
        return []
    lines = b"".join(msgspec.json.encode(request) + b"\n" for request in requests)
    command = [str(PYTHON), "-m", "gpu_workers.rehearsal"]
    ended = subprocess.run(command, input=lines, stdout=subprocess.PIPE, cwd=ROOT, check=False)
    return [msgspec.json.decode(line) for line in ended.stdout.splitlines()]
