"""Which pools can train a base model by which method, and how its results are delivered; before it is installed."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

from apps.catalog.models import BaseModel
from apps.contracts.hyperparameters import Method
from apps.finetuning.models import GpuPool
from apps.finetuning.quotes.computation import quote_pools
from apps.finetuning.quotes.pool_facts import find_open_pools
from apps.finetuning.recipes.completion import resolve
from apps.finetuning.recipes.limits import why_no_adapter
from apps.finetuning.recipes.training_data import TrainingData

FIT_TOKENS = 2_048  # of the longest row
_ROWS = 1_000
_METHODS = {Method.LORA: "LoRA", Method.QLORA: "QLoRA", Method.FULL: "Full fine-tuning"}


@dataclass(frozen=True)
class Fit:
    """Whether a pool can train the model by a method, on `gpu_count` GPUs; `reason` says why not."""

    pool: GpuPool
    method: str
    gpu_count: int
    peak_bytes: int
    reason: str

    @property
    def fits(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class ModelFit:
    """The fits of every open pool, by pool and method, and why adapters are not served on shared engines."""

    fits: tuple[Fit, ...]
    serving_refusal: str


def fit_model(
    *, config: Mapping[str, object], parameter_count: int, context_length: int, now: datetime.datetime
) -> ModelFit:
    """Return where a model with this config.json fits, with the usual recipe and rows of at most `FIT_TOKENS` tokens.

    Raises CannotEstimate for a family whose memory is unknown.
    """
    model = BaseModel(
        name="lookup", display_name="This model", config=dict(config), parameter_count=parameter_count,
        context_length=context_length,
    )  # fmt: skip
    pools = find_open_pools(base_model=model, methods=tuple(_METHODS), now=now)
    length = min(FIT_TOKENS, context_length)
    data = TrainingData(
        rows=_ROWS, tokens=_ROWS * length, trained_tokens=_ROWS * length, longest_row_tokens=length,
        row_lengths=((length, _ROWS),),
    )  # fmt: skip
    fits = []
    for method, name in _METHODS.items():
        recipe = resolve(base_model=model, method=method, asked={"max_length": length})
        quotes = quote_pools(base_model=model, data=data, hyperparameters=recipe, pools=pools, with_ways=False)
        for pool in pools.pools:
            own = sorted((quoted for quoted in quotes if quoted.pool == pool), key=lambda quoted: quoted.gpu_count)
            best = next((quoted for quoted in own if quoted.estimate.fits), own[0])
            reason = "" if best.estimate.fits else best.estimate.reason or "Does not fit."
            fits.append(Fit(pool, name, best.gpu_count, best.estimate.peak_bytes, reason))
    return ModelFit(tuple(sorted(fits, key=lambda fit: fit.pool.name)), why_no_adapter(base_model=model))
