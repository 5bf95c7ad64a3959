"""The interface of the trainer that a run's callback uses."""

from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import TrainerState


class ResumableTrainer(Protocol):
    """transformers' Trainer with the additions of RunTrainer; attributes without a comment are transformers' own."""

    model: Any
    model_wrapped: Any
    args: Any
    state: TrainerState
    data_collator: Any
    current_gradient_accumulation_steps: int
    progress: Any  # the callback itself
    eval_collator: Any  # makes a batch of validation rows
    work_dir: Path

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss and the gradients of one micro-batch."""
        ...

    @property
    def unwrapped_model(self) -> Any:
        """Return the model below accelerate's wrappers."""
        ...

    def loss_parts(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a batch's summed loss, the number of correct predictions, and the number scored."""
        ...

    def longest_rows(self) -> list[dict[str, Any]]:
        """Return the micro-batch that needs the most memory, as input of the collator."""
        ...

    def write_checkpoint(self, root: Path) -> tuple[Path, str] | None:
        """Write everything that a resume needs; return the folder and the hash of its manifest."""
        ...

    def save_trained(self, path: Path) -> None:
        """Write the current trained weights."""
        ...
