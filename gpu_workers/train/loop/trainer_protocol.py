"""The interface of the trainer that a run's callback uses."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import peft
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState, TrainingArguments

from gpu_workers.train.data.encoding import TokenRow
from gpu_workers.train.data.rows import PairRow

if TYPE_CHECKING:  # the callback has the trainer, and the trainer the callback
    from gpu_workers.train.loop.run_callback import RunCallback


class ResumableTrainer(Protocol):
    """transformers' Trainer with the additions of RunTrainer; attributes without a comment are transformers' own."""

    model: torch.nn.Module
    model_wrapped: torch.nn.Module
    args: TrainingArguments
    state: TrainerState
    data_collator: Callable[..., dict[str, torch.Tensor]]
    current_gradient_accumulation_steps: int
    progress: "RunCallback"
    eval_collator: Callable[..., dict[str, torch.Tensor]]  # makes a batch of validation rows
    work_dir: Path
    processing_class: PreTrainedTokenizerBase

    def training_step(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute the loss and the gradients of one micro-batch."""
        ...

    @property
    def unwrapped_model(self) -> PreTrainedModel | peft.PeftModel:
        """Return the model below accelerate's wrappers."""
        ...

    def loss_parts(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a batch's summed loss, the number of correct predictions, and the number scored."""
        ...

    def longest_rows(self) -> Sequence[TokenRow] | Sequence[PairRow]:
        """Return the micro-batch that needs the most memory, as input of the collator."""
        ...

    def write_checkpoint(self, root: Path) -> tuple[Path, str] | None:
        """Write everything that a resume needs; return the folder and the hash of its manifest."""
        ...

    def save_trained(self, path: Path) -> None:
        """Write the current trained weights."""
        ...
