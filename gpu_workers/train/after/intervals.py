"""Confidence intervals of 95 %: Wilson's for shares, the percentile bootstrap over rows for everything else."""

from typing import TypeAlias

import numpy as np

from apps.contracts.evaluation import Comparison, ConfidenceInterval
from apps.contracts.evaluation.paired_shares import wilson

Array: TypeAlias = "np.ndarray"
WILSON = "Wilson 95 %"
BOOTSTRAP = "bootstrap over rows, 95 %"
_RESAMPLES = 2_000
_SEED = 20_240_726  # fixed: the same rows always give the same interval


def compare_ratio(name: str, base: Array, tuned: Array, weight: Array, *, is_higher_better: bool) -> Comparison:
    """Compare sum/weight of two models on the same rows, such as loss per token."""
    picks = np.random.default_rng(_SEED).integers(0, len(weight), (_RESAMPLES, len(weight)))
    weights = weight[picks].sum(axis=1)
    bases, tuneds = base[picks].sum(axis=1) / weights, tuned[picks].sum(axis=1) / weights
    total = weight.sum()
    value, tuned_value = base.sum() / total, tuned.sum() / total
    return Comparison(
        name=name,
        base=_percentiles(value, bases),
        tuned=_percentiles(tuned_value, tuneds),
        difference=_percentiles(tuned_value - value, tuneds - bases),
        method=BOOTSTRAP,
        rows=len(weight),
        is_higher_better=is_higher_better,
    )


def compare_scores(name: str, base: Array, tuned: Array) -> Comparison:
    """Compare scores of answers: as shares if every score is 0 or 1, as means otherwise."""
    found = compare_ratio(name, base, tuned, np.ones(len(base)), is_higher_better=True)
    is_share = bool(np.isin(base, (0.0, 1.0)).all() and np.isin(tuned, (0.0, 1.0)).all())
    if not is_share:
        return found
    return Comparison(
        name=name,
        base=wilson(int(base.sum()), len(base)),
        tuned=wilson(int(tuned.sum()), len(tuned)),
        difference=found.difference,
        method=WILSON,
        rows=len(base),
    )


def _percentiles(value: float, resampled: Array) -> ConfidenceInterval:
    low, high = np.percentile(resampled, (2.5, 97.5))
    return ConfidenceInterval(value=float(value), low=float(low), high=float(high))
