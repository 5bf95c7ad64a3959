"""One optimizer step of the trainer, traced: building the trainer, forward, backward, clipping, and the optimizer."""

import gc
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import peft
import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from apps.contracts.chat import RenderedRow
from apps.contracts.hyperparameters import Method
from apps.contracts.runs import BaseModelRef, DatasetRef, MemoryRequest, RunSpec
from apps.estimates.physics.stacks import ANNEAL, STACKS
from gpu_workers.common.events import EventWriter
from gpu_workers.rehearsal.bases import build_fake_base
from gpu_workers.rehearsal.storages import LiveStorages
from gpu_workers.train.data.encoding import Encoded
from gpu_workers.train.data.rows import Pairs, Rows
from gpu_workers.train.loop.callbacks import StopFlag
from gpu_workers.train.loop.sft import build_trainer
from gpu_workers.train.model.attention import attention_of
from gpu_workers.train.model.hardware import Hardware, choose_engine
from gpu_workers.train.model.loading import adapt, lora_config
from gpu_workers.train.model.sharding import shard_model

LOADED, REFERENCE, BATCH, HEAD, STEP = "loaded", "reference", "batch", "head", "optimizer_step"
FIRST, LAST = "first", "last"
_SETUP = ""  # not part of a step
_TOKEN = 2  # any id but padding and the end


class Trace(NamedTuple):
    """The peak of each moment in bytes, and the bytes that stay between steps. `weights` are the base model's."""

    peaks: dict[str, int]
    resting: int
    weights: int


def trace_step(
    request: MemoryRequest,
    folder: Path,
    live: LiveStorages,
    hardware: Hardware,
    build_base: Callable[..., PreTrainedModel] = build_fake_base,
) -> Trace:
    """Run one step of the job whose model is in `folder`, counted by `live`; with fake tensors or with real ones."""
    spec = run_spec(request)
    recipe = spec.hyperparameters
    engine = choose_engine(hardware, recipe, attention=attention_of(folder))
    is_stock = request.stack != ANNEAL.key
    if is_stock:
        is_eager = request.attention == "eager"
        engine = msgspec.structs.replace(engine, dtype="bfloat16", is_packing=False, uses_own_attention=is_eager)
    is_sharded = request.parallelism == "fsdp"
    live.enter(LOADED)
    base = build_base(folder, method=recipe.method, engine=engine)
    weights = live.bytes
    marks = _Marks(live, base)
    kept = {
        "keeps_gradients": recipe.gradient_accumulation_steps > 1,
        "keeps_buckets": request.parallelism == "ddp",
    }
    if is_stock:
        trainer = _stock_trainer(base, request, folder)
        resting = _run_step(trainer, lambda: _padded_batch(request), live, marks, **kept)
        return _result(live, resting, weights)
    model = adapt(base, recipe, engine, is_sharded=is_sharded)
    if is_sharded:
        gathers_bf16 = recipe.method is Method.FULL and engine.autocast == "bf16"
        model = shard_model(model, base, is_offloaded=recipe.cpu_offload, gathers_bf16=gathers_bf16)
    live.enter(REFERENCE)
    if is_sharded:
        live.peaks.pop(LOADED)  # a sharded model is read in the host's memory
    with closing(EventWriter(Path(os.devnull))) as events:
        trainer = build_trainer(
            model=model, folder=folder, training=made_up_rows(request), validation=None, spec=spec,
            work_dir=folder, events=events, stop=StopFlag(), engine=engine,
        )  # fmt: skip
    batch_of = lambda: trainer.data_collator(trainer.longest_rows())  # noqa: E731
    resting = _run_step(trainer, batch_of, live, marks, **kept)
    return _result(live, resting, weights)


def _result(live: LiveStorages, resting: int, weights: int) -> Trace:
    return Trace({key: value for key, value in live.peaks.items() if key != _SETUP}, resting, weights)


def _stock_trainer(base: PreTrainedModel, request: MemoryRequest, folder: Path) -> Trainer:
    """Return transformers' own trainer with PEFT, because published figures were measured with this stack."""
    recipe, stack = request.hyperparameters, STACKS[request.stack]
    if recipe.method is Method.FULL and stack.full_state == "mixed":
        base.float()
    if recipe.method is Method.QLORA and stack.upcasts_unquantized:
        base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=recipe.gradient_checkpointing)
    model = base if recipe.method is Method.FULL else peft.get_peft_model(base, lora_config(recipe))
    if recipe.gradient_checkpointing and recipe.method is not Method.FULL:
        model.enable_input_require_grads()
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=request.rows, bf16=True, use_cpu=True, report_to=[],
        gradient_checkpointing=recipe.gradient_checkpointing,
    )  # fmt: skip
    optimizer = {"lr": arguments.learning_rate, "foreach": stack.has_step_copy, "fused": not stack.has_step_copy}
    return Trainer(model=model, args=arguments, optimizer_cls_and_kwargs=(torch.optim.AdamW, optimizer))


def _padded_batch(request: MemoryRequest) -> dict[str, torch.Tensor]:
    """Return rows of which all but the longest are padded, unless they are packed."""
    ids = torch.full((request.rows, request.row_tokens), _TOKEN)
    mask = torch.ones_like(ids)
    if not request.hyperparameters.packing:
        mask[1:, -1] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


class _Marks:
    """Enters a moment of `live` for the first and the last layer's passes, and for the head between them."""

    def __init__(self, live: LiveStorages, base: torch.nn.Module) -> None:
        self._live, self.is_backward = live, False
        layers = base.get_decoder().layers
        for index, layer in enumerate(layers):
            place = FIRST if index == 0 else LAST if index == len(layers) - 1 else f"between {index}"
            layer.register_forward_pre_hook(lambda *_, place=place: self._pass(place))
            layer.register_forward_hook(lambda _, __, output, place=place: self._leave(place, output))

    def _pass(self, place: str) -> None:
        self._live.enter(f"{'backward' if self.is_backward else 'forward'} {place}")

    def _leave(self, place: str, output: object) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if self.is_backward:
            return
        if place == LAST:
            self._live.enter(HEAD)
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: self._turn(place))

    def _turn(self, place: str) -> None:
        self.is_backward = True
        self._pass(place)


def _run_step(
    trainer: Any,  # RunTrainer or transformers' own, whose steps have no public names
    batch_of: Callable[[], dict[str, torch.Tensor]],
    live: LiveStorages,
    marks: _Marks,
    *,
    keeps_gradients: bool,
    keeps_buckets: bool,
) -> int:
    """Run a step with the optimizer's state, as in every step but the first. Return the bytes that stay after it.

    `keeps_buckets`: DistributedDataParallel copies gradients into flat buffers of its own, which stay
    (torch/csrc/distributed/c10d/reducer.cpp, gradient_as_bucket_view off).
    """
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    model, _ = trainer._prepare_for_training(1, None, None)
    optimizer = trainer.optimizer
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]

    def fill_gradients() -> None:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)

    live.enter(_SETUP)
    buckets = [torch.empty_like(parameter) for parameter in trained] if keeps_buckets else []
    gc.collect()  # what only cycles keep would be freed at any time
    fill_gradients()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    resting = live.bytes
    if keeps_gradients:
        fill_gradients()
    live.enter(BATCH)
    batch = batch_of()
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            live.add(value)
    trainer.current_gradient_accumulation_steps = 1
    marks.is_backward = False
    trainer.training_step(model, batch)
    del batch
    live.enter(STEP)
    trainer._clip_grad_norm(model)
    optimizer.step()
    live.enter(_SETUP)
    buckets.clear()
    return resting


def run_spec(request: MemoryRequest) -> RunSpec:
    nothing = DatasetRef(id="", sha256="", bytes=0, rows=0, url="")
    recipe = request.hyperparameters
    micro_steps = recipe.gradient_accumulation_steps * request.gpu_count
    return RunSpec(
        run_id="rehearsal", job_id="rehearsal", organization_id="", attempt=1,
        base_model=BaseModelRef(id="", name=""), training=nothing, checkpoint_interval_seconds=10**9,
        gpu_count=request.gpu_count, parallelism=request.parallelism,
        hyperparameters=msgspec.structs.replace(
            recipe, epochs=1, batch_size=request.rows * micro_steps, max_length=request.row_tokens
        ),
    )  # fmt: skip


def made_up_rows(request: MemoryRequest) -> Rows:
    """Return one micro-batch of rows of the requested length."""
    length, trained = request.row_tokens, max(1, round(request.row_tokens * request.trained_share))
    if request.hyperparameters.objective.is_preference:
        answer = [_TOKEN] * trained
        pair = ([_TOKEN] * max(1, length - trained), answer[: length - 1], answer[: length - 1])
        return Pairs([pair] * request.rows, n_dropped=0, n_truncated=0)
    row = RenderedRow(text="", spans=(), token_ids=[_TOKEN] * length, trained=((length - trained, length),))
    return Encoded([row] * request.rows, n_dropped=0, n_truncated=0)
