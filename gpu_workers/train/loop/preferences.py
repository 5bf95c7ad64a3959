"""The common base of preference trainers: pairs of answers in a batch, tokenised here."""

from typing import Any

import torch
from transformers import TrainingArguments
from trl.trainer.dpo_trainer import DataCollatorForPreference

from gpu_workers.train.data.rows import Pairs
from gpu_workers.train.loop.base_trainer import RunTrainer


class PairTrainer(RunTrainer):
    """A mixin for TRL's preference trainers, placed before them."""

    args: TrainingArguments

    def __init__(self, *args: object, rows: Pairs, pad_id: int, **kwargs: Any) -> None:
        self._rows = rows
        self.eval_collator = DataCollatorForPreference(
            pad_token_id=pad_id, pad_to_multiple_of=8 if torch.cuda.is_available() else None
        )
        super().__init__(*args, data_collator=self.eval_collator, **kwargs)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the batch's mean loss, and add the batch to the report's window."""
        window = self.progress.window
        loss, n_correct, n_pairs = self.loss_parts(model, inputs)
        window.n_correct += n_correct
        window.n_scored += n_pairs
        window.n_trained += inputs["completion_mask"].sum()
        window.n_tokens += inputs["attention_mask"].sum()
        mean = loss / n_pairs
        # the last step of an epoch may have fewer micro-batches
        window.loss += mean.detach() / (self.current_gradient_accumulation_steps * self.args.world_size)
        return mean
