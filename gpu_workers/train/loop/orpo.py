"""Odds ratio preference optimization (arXiv 2403.07691) with TRL's ORPOTrainer on pairs tokenised here.

The preferred answer is learned and separated from the other one, without a reference model. TRL's own forward pass
scores every position of the batch and counts the prompt as learned. Here only answers are scored, in tiles, as for DPO.
Each pair has equal weight, so the loss of a recipe does not depend on the micro-batch.
"""

import warnings
from typing import Any

import peft
import torch
from transformers import PreTrainedModel
from trl.import_utils import TRLExperimentalWarning
from trl.trainer.utils import add_fused_lm_head

from apps.contracts.hyperparameters import Hyperparameters
from gpu_workers.train.data.encoding import IGNORED
from gpu_workers.train.data.rows import PairRow, Pairs
from gpu_workers.train.loop.preferences import PairTrainer

with warnings.catch_warnings():
    # The version of TRL is pinned, and a test compares its loss with ours: a change cannot go unnoticed.
    warnings.simplefilter("ignore", TRLExperimentalWarning)
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer


def orpo_config(arguments: dict[str, object], recipe: Hyperparameters) -> ORPOConfig:
    return ORPOConfig(**arguments, beta=recipe.orpo_beta, max_length=recipe.max_length)


class _Tokenised(torch.utils.data.Dataset[PairRow]):
    """Pairs that are already tokenised: the result of TRL's `map` over the rows."""

    def __init__(self, rows: Pairs) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PairRow:
        return self._rows.rows[index]

    def map(self, *_: object, **__: object) -> "_Tokenised":
        return self


class OrpoTrainer(PairTrainer, ORPOTrainer):
    """ORPOTrainer on prepared rows. A pair counts as correct if the preferred answer is the likelier one."""

    def __init__(
        self,
        *args: object,
        model: PreTrainedModel | peft.PeftModel,
        rows: Pairs,
        validation: Pairs | None,
        **kwargs: Any,
    ) -> None:
        add_fused_lm_head(model.get_base_model() if isinstance(model, peft.PeftModel) else model)
        kwargs["train_dataset"] = _Tokenised(rows)
        super().__init__(*args, model=model, rows=rows, **kwargs)

    def loss_parts(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the summed loss of a batch, the number of correctly ranked pairs, and the number of pairs."""
        mask_BT = inputs["completion_mask"]
        labels_BT = inputs["input_ids"].masked_fill(mask_BT == 0, IGNORED)
        outputs = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels_BT, fused_lm_head=True
        )
        # The first half of the batch is the chosen answers, the second half the rejected ones.
        chosen, rejected = (outputs.log_probs.sum(dim=1) / mask_BT[:, 1:].sum(dim=1)).chunk(2)
        odds, *_ = self.odds_ratio_loss(chosen, rejected)
        loss = -(chosen + odds).sum()
        n_pairs = torch.tensor(len(chosen))
        if self.aux_loss_enabled:  # keeps all experts of a mixture in use
            loss = loss + self.aux_loss_coef * outputs.aux_loss * n_pairs
        return loss, (chosen > rejected).sum(), n_pairs
