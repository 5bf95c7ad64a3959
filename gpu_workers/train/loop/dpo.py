"""Direct preference optimization with TRL's DPOTrainer on pairs tokenised here.

The reference model's log-probabilities of both answers are computed once, before training, so no second model stays in
memory. A resumed run begins from the same weights and computes the same numbers.
"""

from typing import Any

import datasets
import torch
from trl import DPOConfig, DPOTrainer

from apps.contracts.hyperparameters import Hyperparameters, Method
from gpu_workers.common.pulse import beat
from gpu_workers.train.data.rows import Pairs
from gpu_workers.train.loop.preferences import PairTrainer

_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")


def dpo_config(arguments: dict[str, object], recipe: Hyperparameters) -> DPOConfig:
    # If requested at construction, TRL hashes every weight to name a cache; with an adapter it can be requested later.
    is_full = recipe.method is Method.FULL
    return DPOConfig(**arguments, beta=recipe.dpo_beta, max_length=None, precompute_ref_log_probs=is_full)


class DpoTrainer(PairTrainer, DPOTrainer):
    """DPOTrainer on prepared rows. A pair counts as correct if the preferred answer gained more than the other."""

    precompute_ref_logps: bool
    train_dataset: datasets.Dataset

    def __init__(self, *args: object, rows: Pairs, validation: Pairs | None, **kwargs: Any) -> None:
        super().__init__(*args, rows=rows, **kwargs)
        _place_reference(self.model)
        size = int(self.args.per_device_train_batch_size)
        if not self.precompute_ref_logps:
            self.train_dataset = self._precompute_ref_logps(self.train_dataset, "train", size)
        _take_references(rows, self.train_dataset)
        if validation is not None:
            _take_references(validation, self._precompute_ref_logps(validation.as_dataset(), "eval", size))
        self.precompute_ref_logps = True

    def _prepare_dataset(self, dataset: datasets.Dataset, *args: object, **kwargs: object) -> datasets.Dataset:
        return dataset

    def _precompute_ref_logps(self, dataset: datasets.Dataset, name: str, batch_size: int) -> datasets.Dataset:
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for at in range(0, len(dataset), batch_size):
            beat()
            rows = [dataset[index] for index in range(at, min(at + batch_size, len(dataset)))]
            parts.append(self.compute_ref_log_probs(self.model, self._prepare_inputs(self.eval_collator(rows))))
        for column, values in zip(_REFERENCES, zip(*parts, strict=True), strict=True):
            dataset = dataset.add_column(column, torch.cat(values).double().cpu().tolist())
        return dataset

    def loss_parts(
        self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the summed loss of a batch, the number of correctly ranked pairs, and the number of pairs."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        n_pairs = torch.tensor(len(inputs["input_ids"]) // 2)
        mean = self._compute_loss(model, inputs, False)
        accuracy = metrics["rewards/accuracies"][-1]
        metrics.clear()  # TRL keeps every step's until it logs, which happens elsewhere
        return mean * n_pairs, torch.tensor(accuracy) * n_pairs, n_pairs


def _place_reference(model: torch.nn.Module) -> None:
    """Put the adapter that TRL copied as reference beside the trained one. PEFT left it with the base's weights.

    Those may be in the host's memory.
    """
    for name, module in model.named_modules():
        if name.endswith(".default"):
            for parameter in module.parameters():
                model.get_submodule(name.removesuffix("default") + "ref").to(parameter.device)


def _take_references(rows: Pairs, dataset: datasets.Dataset) -> None:
    chosen, rejected = _REFERENCES
    for row, chosen_logps, rejected_logps in zip(rows.rows, dataset[chosen], dataset[rejected], strict=True):
        row["ref_chosen_logps"], row["ref_rejected_logps"] = chosen_logps, rejected_logps
