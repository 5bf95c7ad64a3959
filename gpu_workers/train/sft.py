"""Supervised fine-tuning with TRL's SFTTrainer on pre-tokenised rows, labels only on trained tokens."""

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerControl, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer

from apps.contracts.runs import EvaluationCompleted, Hyperparameters, Phase, PhaseChanged, RunSpec
from gpu_workers.artifacts import folder_bytes, read_manifest
from gpu_workers.events import CHECKPOINTS_FOLDER, UNNUMBERED, CheckpointReady, EventWriter
from gpu_workers.train.callbacks import ProgressCallback, StopFlag
from gpu_workers.train.checkpoint import Progress, TrainingState, save_checkpoint
from gpu_workers.train.cpu_lora import speed_up_lora
from gpu_workers.train.data import IGNORED, Encoded, LengthGroupedSampler, PaddingCollator
from gpu_workers.train.evaluate import Evaluation, evaluate

# Models that change their logits after the head; their loss goes through TRL's own (slower on a CPU) path.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


class Trainer(SFTTrainer):
    """SFTTrainer with sealed checkpoints, a resumable length-grouped order, and no work for masked positions."""

    def __init__(self, *args: Any, spec: RunSpec, work_dir: Path, sampler: LengthGroupedSampler, **kwargs: Any) -> None:
        self._spec = spec
        self._root = work_dir / CHECKPOINTS_FOLDER
        self._sampler = sampler
        self.progress: RunCallback
        self.events: EventWriter
        super().__init__(*args, **kwargs)
        self._scores_selected_only = _scores_selected_only(self.model)

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedSampler:
        return self._sampler

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return the mean loss over the optimizer step's trained tokens, and feed the window of the report."""
        window = self.progress.window
        loss, n_correct, n_trained = self.loss_parts(model, inputs)
        window.n_correct += n_correct
        window.n_trained += n_trained
        window.n_tokens += inputs["attention_mask"].sum()
        step_loss = loss / (n_trained if num_items_in_batch is None else num_items_in_batch)
        window.loss += step_loss.detach()
        return step_loss

    def loss_parts(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return summed loss, correctly predicted tokens and trained tokens of a batch."""
        if self._scores_selected_only:
            return _score_selected(model, inputs)
        outputs = model(**inputs, fused_lm_head=True)
        return -outputs.log_probs.sum(), outputs.is_top1.sum(), outputs.label_mask.sum()

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Called once an optimizer step, clipped or not."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.progress.window.grad_norm = norm
        self.progress.window.steps += 1
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Keep nothing: the log history would grow with every step and travel in every checkpoint."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        progress = self.progress
        progress.watch.pause()
        step = self.state.global_step
        counts = Progress(
            step=step,
            trained_tokens=progress.trained_tokens,
            recent_losses=tuple(progress.recent_losses),
            tokens=progress.tokens,
        )
        folder, digest = save_checkpoint(
            self._root,
            self._spec,
            TrainingState(
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self.lr_scheduler,
                trainer_state=self.state,
                progress=counts,
            ),
        )
        progress.note_saved(step)
        self.events.write(
            CheckpointReady(
                sequence=UNNUMBERED,
                step=step,
                folder=f"{CHECKPOINTS_FOLDER}/{folder.name}",
                manifest_sha256=digest,
                bytes=folder_bytes(read_manifest(folder)),
                trained_tokens=counts.trained_tokens,
                training_seconds=progress.watch.seconds,
                train_loss=progress.mean_recent_loss,
            )
        )
        progress.watch.start()


class RunCallback(ProgressCallback):
    """ProgressCallback plus what needs the trainer: the epoch of the sampler and the evaluation after each epoch."""

    def __init__(self, *args: Any, sampler: LengthGroupedSampler, stop: StopFlag, **kwargs: Any) -> None:
        super().__init__(*args, stop=stop, **kwargs)
        self.trainer: Trainer
        self.validation: Encoded | None = None
        self.evaluation: Evaluation | None = None
        self._sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._sampler.epoch = state.global_step // self.steps_per_epoch

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.validation is None or self._stop.is_set:
            return
        self.watch.pause()
        self._events.write(PhaseChanged(sequence=UNNUMBERED, phase=Phase.EVALUATING))
        self.evaluation = evaluate(
            self.trainer.model,
            self.validation,
            collate=self.trainer.data_collator,
            batch_size=args.per_device_train_batch_size,
            loss_parts=self.trainer.loss_parts,
            should_stop=lambda: self._stop.is_set,
        )
        if self.evaluation is not None:
            self._events.write(
                EvaluationCompleted(
                    sequence=UNNUMBERED,
                    step=state.global_step,
                    valid_loss=self.evaluation.valid_loss,
                    valid_mean_token_accuracy=self.evaluation.valid_mean_token_accuracy,
                )
            )
        self._events.write(PhaseChanged(sequence=UNNUMBERED, phase=Phase.TRAINING))
        self.watch.start()


def build_trainer(
    *,
    model: peft.PeftModel,
    folder: Path,
    training: Encoded,
    validation: Encoded | None,
    spec: RunSpec,
    work_dir: Path,
    events: EventWriter,
    stop: StopFlag,
) -> Trainer:
    """Return a trainer ready to `train()`; its callback is at `.progress`."""
    hyperparameters = spec.hyperparameters
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    sampler = LengthGroupedSampler(training.lengths, batch_size=hyperparameters.batch_size, seed=hyperparameters.seed)
    callback = RunCallback(
        events,
        stop=stop,
        sampler=sampler,
        checkpoint_interval_seconds=spec.checkpoint_interval_seconds,
        steps_per_epoch=count_steps_per_epoch(len(training), hyperparameters),
    )
    trainer = Trainer(
        model=model,
        args=_arguments(work_dir, hyperparameters, total_steps=count_steps(len(training), hyperparameters)),
        train_dataset=training.as_dataset(),
        data_collator=PaddingCollator(_pad_id(tokenizer), multiple_of=8 if torch.cuda.is_available() else 1),
        processing_class=tokenizer,
        callbacks=[callback],
        spec=spec,
        work_dir=work_dir,
        sampler=sampler,
    )
    _adapter_in_float32(trainer.model)
    if not torch.cuda.is_available():
        speed_up_lora(trainer.model)
    trainer.progress, trainer.events = callback, events
    callback.trainer, callback.validation = trainer, validation
    return trainer


def count_steps_per_epoch(rows: int, hyperparameters: Hyperparameters) -> int:
    micro_batches = -(-rows // micro_batch_size(hyperparameters))
    return -(-micro_batches // hyperparameters.gradient_accumulation_steps)


def count_steps(rows: int, hyperparameters: Hyperparameters) -> int:
    return count_steps_per_epoch(rows, hyperparameters) * hyperparameters.epochs


def micro_batch_size(hyperparameters: Hyperparameters) -> int:
    return max(1, hyperparameters.batch_size // hyperparameters.gradient_accumulation_steps)


def _arguments(work_dir: Path, hyperparameters: Hyperparameters, *, total_steps: int) -> SFTConfig:
    on_gpu = torch.cuda.is_available()
    return SFTConfig(
        output_dir=str(work_dir / CHECKPOINTS_FOLDER),
        num_train_epochs=hyperparameters.epochs,
        per_device_train_batch_size=micro_batch_size(hyperparameters),
        gradient_accumulation_steps=hyperparameters.gradient_accumulation_steps,
        learning_rate=hyperparameters.learning_rate,
        lr_scheduler_type=hyperparameters.lr_scheduler,
        warmup_steps=round(hyperparameters.warmup_ratio * total_steps),
        weight_decay=hyperparameters.weight_decay,
        max_grad_norm=hyperparameters.max_grad_norm,
        gradient_checkpointing=hyperparameters.gradient_checkpointing,
        max_length=hyperparameters.max_length,
        seed=hyperparameters.seed,
        data_seed=hyperparameters.seed,
        optim="adamw_torch_fused",
        bf16=on_gpu and torch.cuda.is_bf16_supported(),
        use_cpu=not on_gpu,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=on_gpu,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        include_num_input_tokens_seen="no",
        logging_nan_inf_filter=False,
    )


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any id will do: padding is masked and never trained."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0


def _adapter_in_float32(model: torch.nn.Module) -> None:
    """Undo TRL's cast of a QLoRA adapter to bfloat16, in which small updates are rounded away."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _scores_selected_only(model: peft.PeftModel) -> bool:
    """Whether to run the head on trained positions here: on a CPU, TRL's head scores every position of the batch."""
    config = model.config.get_text_config()
    changes = [name for name in _LOGIT_CHANGES if getattr(config, name, None) not in (None, 1, 1.0)]
    is_mixture = bool(getattr(config, "output_router_logits", False))
    return not torch.cuda.is_available() and not changes and not is_mixture


def _score_selected(
    model: peft.PeftModel, inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    causal = model.get_base_model()
    backbone = causal.base_model
    hidden = backbone(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
    ).last_hidden_state[:, :-1]
    labels = inputs["labels"][:, 1:]
    selected = labels != IGNORED
    targets = labels[selected]
    head = causal.get_output_embeddings()
    logits = head(hidden[selected].to(head.weight.dtype)).float()
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    n_correct = (logits.detach().argmax(-1) == targets).sum()
    return loss, n_correct, selected.sum()
