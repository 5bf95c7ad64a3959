"""Supervised fine-tuning and continued pre-training with TRL's SFTTrainer, and the builder of all trainers.

Rows are tokenised here, and only trained tokens have labels.
"""

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from apps.contracts.hyperparameters import Hyperparameters, Method, Objective
from apps.contracts.runs import RunSpec
from gpu_workers.common.events import CHECKPOINTS_FOLDER, EventWriter
from gpu_workers.train.data.encoding import (
    IGNORED,
    Encoded,
    LengthGroupedSampler,
    PaddingCollator,
    ShuffledSampler,
)
from gpu_workers.train.data.packing import PackingCollator
from gpu_workers.train.data.rows import Pairs, Rows
from gpu_workers.train.loop.base_trainer import RunTrainer
from gpu_workers.train.loop.callbacks import StopFlag
from gpu_workers.train.loop.dpo import DpoTrainer, dpo_config
from gpu_workers.train.loop.orpo import OrpoTrainer, orpo_config
from gpu_workers.train.loop.run_callback import RunCallback
from gpu_workers.train.model.attention import attention_of
from gpu_workers.train.model.cpu_lora import speed_up_lora
from gpu_workers.train.model.hardware import Engine, choose_engine, detect

# Models that change their logits after the head; their loss uses TRL's own code, which is slower on a CPU.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
# oneDNN compiles a kernel for each new shape of a product, which takes as long as the product itself. On a CPU the
# numbers of packed tokens and of trained tokens are therefore multiples of these, so that few shapes occur.
_CPU_TOKENS, _CPU_TRAINED_TOKENS = 64, 32


class Trainer(RunTrainer, SFTTrainer):
    """SFTTrainer that does no work for masked positions."""

    def __init__(self, *args: object, rows: Encoded, engine: Engine, **kwargs: Any) -> None:
        self._rows = rows
        super().__init__(*args, **kwargs)
        is_alone = self.args.world_size == 1 and self.spec.parallelism != "fsdp"
        self._scores_selected_only = not engine.is_gpu and is_alone and _has_plain_head(self.model)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the mean loss over the optimizer step's trained tokens, and add the batch to the report's window."""
        window = self.progress.window
        loss, n_correct, n_trained = self.loss_parts(model, inputs)
        window.n_correct += n_correct
        window.n_scored += n_trained
        window.n_trained += n_trained
        window.n_tokens += inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["cu_seq_lens_q"][-1]
        step_loss = loss / (n_trained if num_items_in_batch is None else num_items_in_batch)
        window.loss += step_loss.detach()
        # Gradients are averaged over the processes, but the divisor counts the tokens of all processes.
        return step_loss if num_items_in_batch is None else step_loss * self.args.world_size

    def loss_parts(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the summed loss, the correctly predicted tokens and the trained tokens of a batch."""
        if self._scores_selected_only:
            return _score_selected(model, inputs)
        outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        return -outputs.log_probs.sum(), outputs.is_top1.sum(), outputs.label_mask.sum()


def build_trainer(
    *,
    model: torch.nn.Module,
    folder: Path,
    training: Rows,
    validation: Rows | None,
    spec: RunSpec,
    work_dir: Path,
    events: EventWriter,
    stop: StopFlag,
    engine: Engine | None = None,
) -> RunTrainer:
    """Return a trainer ready to `train()`; its callback is at `.progress`."""
    recipe = spec.hyperparameters
    engine = engine or choose_engine(detect(), recipe, attention=attention_of(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    sampler = _sampler(training, spec, is_packing=engine.is_packing)
    callback = RunCallback(
        events,
        stop=stop,
        spec=spec,
        sampler=sampler,
        training=training,
        validation=validation,
        work_dir=work_dir,
        checkpoint_interval_seconds=spec.checkpoint_interval_seconds,
        steps_per_epoch=count_steps_per_epoch(len(training), recipe),
    )
    options: dict[str, Any] = {
        "model": model,
        "train_dataset": training.as_dataset(),
        "processing_class": tokenizer,
        "callbacks": [callback],
        "spec": spec,
        "work_dir": work_dir,
        "sampler": sampler,
    }
    arguments = _arguments(work_dir, spec, engine, total_steps=count_steps(len(training), recipe))
    trainer: RunTrainer
    if isinstance(training, Pairs):
        assert validation is None or isinstance(validation, Pairs)
        options |= {"rows": training, "validation": validation, "pad_id": _pad_id(tokenizer)}
        if recipe.objective is Objective.ORPO:
            trainer = OrpoTrainer(args=orpo_config(arguments, recipe), **options)
        else:
            trainer = DpoTrainer(args=dpo_config(arguments, recipe), **options)
    else:
        padding = PaddingCollator(_pad_id(tokenizer), multiple_of=8 if engine.is_gpu else 1)
        collator = PackingCollator(multiple_of=1 if engine.is_gpu else _CPU_TOKENS) if engine.is_packing else padding
        config = SFTConfig(**arguments, max_length=recipe.max_length, dataset_kwargs={"skip_prepare_dataset": True})
        trainer = Trainer(args=config, rows=training, engine=engine, data_collator=collator, **options)
        trainer.eval_collator = padding
    if recipe.method is not Method.FULL:
        _adapter_in_float32(trainer.model)
        if not engine.is_gpu and spec.parallelism != "fsdp":
            speed_up_lora(trainer.model)
    trainer.progress, trainer.events = callback, events
    callback.trainer = trainer
    return trainer


def count_steps_per_epoch(rows: int, hyperparameters: Hyperparameters) -> int:
    micro_batches = -(-rows // micro_batch_size(hyperparameters))
    return -(-micro_batches // hyperparameters.gradient_accumulation_steps)


def count_steps(rows: int, hyperparameters: Hyperparameters) -> int:
    return count_steps_per_epoch(rows, hyperparameters) * hyperparameters.epochs


def micro_batch_size(hyperparameters: Hyperparameters) -> int:
    return max(1, hyperparameters.batch_size // hyperparameters.gradient_accumulation_steps)


def _rows_a_process(spec: RunSpec) -> int:
    return max(1, micro_batch_size(spec.hyperparameters) // spec.gpu_count)


def _sampler(training: Rows, spec: RunSpec, *, is_packing: bool) -> ShuffledSampler:
    recipe = spec.hyperparameters
    micro_batches = recipe.gradient_accumulation_steps * spec.gpu_count
    return (ShuffledSampler if is_packing else LengthGroupedSampler)(
        training.lengths,
        batch_size=micro_batches * _rows_a_process(spec),
        micro_batches=micro_batches,
        seed=recipe.seed,
    )


def _arguments(work_dir: Path, spec: RunSpec, engine: Engine, *, total_steps: int) -> dict[str, object]:
    """Return the arguments that every objective shares."""
    hyperparameters = spec.hyperparameters
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(work_dir / CHECKPOINTS_FOLDER),
        "num_train_epochs": hyperparameters.epochs,
        "per_device_train_batch_size": _rows_a_process(spec),
        "gradient_accumulation_steps": hyperparameters.gradient_accumulation_steps,
        "learning_rate": hyperparameters.learning_rate,
        "lr_scheduler_type": hyperparameters.lr_scheduler,
        "warmup_steps": round(hyperparameters.warmup_ratio * total_steps),
        "weight_decay": hyperparameters.weight_decay,
        "max_grad_norm": hyperparameters.max_grad_norm,
        "gradient_checkpointing": hyperparameters.gradient_checkpointing,
        "seed": hyperparameters.seed,
        "data_seed": hyperparameters.seed,
        "optim": engine.optimizer,
        "bf16": engine.autocast == "bf16",
        "fp16": engine.autocast == "fp16",
        "torch_compile": engine.is_compiled,
        "use_cpu": not on_gpu,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": on_gpu,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "no",
        "logging_nan_inf_filter": False,
    }


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return any valid id, because padding is masked and never trained."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0


def _adapter_in_float32(model: torch.nn.Module) -> None:
    """Undo TRL's cast of a QLoRA adapter to bfloat16, which rounds small updates away."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _has_plain_head(model: torch.nn.Module) -> bool:
    """Return whether the head can run only on trained positions. On a CPU, TRL's head scores all positions."""
    config = model.config.get_text_config()
    changes = [name for name in _LOGIT_CHANGES if getattr(config, name, None) not in (None, 1, 1.0)]
    is_mixture = bool(getattr(config, "output_router_logits", False))
    return not changes and not is_mixture


def _score_selected(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    causal = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    given = {name: value for name, value in inputs.items() if name != "labels"}
    # The token after each position is its label, so the last hidden state and the first label have no partner.
    hidden_BTD = causal.base_model(**given, use_cache=False).last_hidden_state[:, :-1]
    labels_BT = inputs["labels"][:, 1:]
    selected_BT = labels_BT != IGNORED
    filling = -int(selected_BT.sum()) % _CPU_TRAINED_TOKENS
    pad = torch.nn.functional.pad
    targets = pad(labels_BT[selected_BT], (0, filling), value=IGNORED)
    hidden_ND = pad(hidden_BTD[selected_BT], (0, 0, 0, filling))
    head = causal.get_output_embeddings()
    logits_NV = head(hidden_ND.to(head.weight.dtype)).float()
    loss = torch.nn.functional.cross_entropy(logits_NV, targets, reduction="sum", ignore_index=IGNORED)
    n_correct = (logits_NV.detach().argmax(-1) == targets).sum()
    return loss, n_correct, selected_BT.sum()
