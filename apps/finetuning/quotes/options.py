"""Options of a quote: their order, their keys, and the changes that make a job fit."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from django.utils.translation import gettext

from apps.catalog.models import PriceRule
from apps.core.errors import InvalidValue
from apps.estimates.fixes import Fix, gib
from apps.estimates.quote import Estimate
from apps.estimates.ranking import RankedOption, Ranking, rank
from apps.estimates.requests import Correction
from apps.finetuning.models import GpuPool, PricePolicy
from apps.finetuning.quotes.rehearsals import QuotedRehearsal
from apps.finetuning.usage.charges import least_cap_nano

_COUNT = re.compile("[1-9][0-9]{0,2}")


@dataclass(frozen=True)
class PoolQuote:
    """One option: a number of GPUs of one pool, which `node_count` machines share evenly.

    `cap_nano` is the quoted maximum: the suggested spend cap, and the hold of a launch. `joining_workers` counts the
    pool's machines that train this base model together with others.
    """

    pool: GpuPool
    estimate: Estimate
    price: PriceRule | None
    live_workers: int
    cap_nano: int | None
    block_reason: str
    correction: Correction | None = None
    ways: tuple["Remedy", ...] = ()
    rehearsal: QuotedRehearsal | None = None
    node_count: int = 1
    joining_workers: int = 0

    @property
    def is_oversized(self) -> bool:
        """Return whether the rehearsed memory exceeds the GPU's."""
        return bool(self.rehearsal and (self.rehearsal.peak_bytes or 0) > self.estimate.capacity_bytes)

    @property
    def is_launchable(self) -> bool:
        return not self.block_reason

    @property
    def gpu_count(self) -> int:
        return self.estimate.gpu_count

    @property
    def gpus_per_node(self) -> int:
        """Return the GPUs of each machine."""
        return self.gpu_count // self.node_count

    @property
    def is_minimum(self) -> bool:
        """Return whether the minimum charge of a start exceeds the expected cost of training."""
        return (self.estimate.billed_seconds_p50 or 0) - 1 > (self.estimate.train_seconds_p50 or 0.0)

    @property
    def is_firm(self) -> bool:
        """Return whether a run that is slower than quoted costs no more than the quoted maximum, and goes on."""
        return self.pool.price_policy == PricePolicy.FIRM

    def maximum_nano(self, asked_nano: int | None) -> int | None:
        """Return the most that a launch with this spend cap costs: with a firm price, at most the quoted maximum."""
        if asked_nano is None or self.cap_nano is None:
            return asked_nano or self.cap_nano
        return min(asked_nano, self.cap_nano) if self.is_firm else asked_nano

    def rest_nano(self, asked_nano: int | None, *, spent_nano: int) -> int | None:
        """Return `maximum_nano` here of a job that spent some of its spend cap elsewhere."""
        return self.maximum_nano(None if asked_nano is None else max(asked_nano - spent_nano, 0))

    @property
    def least_cap_nano(self) -> int | None:
        """Return the lowest spend cap that pays for one start here; None without a price."""
        if self.price is None:
            return None
        step_seconds = (self.estimate.train_seconds_p50 or 0.0) / max(self.estimate.steps, 1)
        return least_cap_nano(price=self.price, gpu_count=self.gpu_count, step_seconds=step_seconds)

    @property
    def key(self) -> str:
        """Return the option's name in forms and rankings: the pool, and the GPUs if there are several.

        Options for one number of machines are quoted at a time, so it is no part of the name.
        """
        return self.pool.name if self.gpu_count == 1 else f"{self.pool.name}:{self.gpu_count}"


@dataclass(frozen=True)
class Remedy:
    """One change that makes the job fit.

    `changes` are the recipe's fields to set, `pool` is the key of the option to take. `cost_nano` is None if unknown.
    `note` gives the reason if the change cannot be applied here.
    """

    fix: Fix
    changes: Mapping[str, Any]
    pool: str | None
    cost_nano: int | None
    note: str = ""


def by_use(quoted: PoolQuote) -> tuple[bool, float, str, int]:
    cost = quoted.estimate.cost_nano_p50
    return not quoted.is_launchable, math.inf if cost is None else cost, quoted.pool.name, quoted.gpu_count


def rank_quotes(quotes: Iterable[PoolQuote], *, deadline_seconds: float | None = None) -> Ranking:
    """Rank the launchable quotes; if there are none, rank all quotes with a price and a time."""
    listed = list(quotes)
    launchable = [quoted for quoted in listed if quoted.is_launchable]
    timed = [(quoted, finish_seconds(quoted.estimate)) for quoted in launchable or listed]
    return rank(
        [
            RankedOption(
                key=quoted.key,
                cost_nano=quoted.estimate.cost_nano_p50,
                finish_seconds_p50=finish[1],
                finish_seconds_p90=finish[2],
            )
            for quoted, finish in timed
            if finish and quoted.estimate.cost_nano_p50 is not None
        ],
        deadline_seconds=deadline_seconds,
    )


def finish_seconds(estimate: Estimate) -> tuple[float, float, float] | None:
    """Return P10, P50 and P90 of the seconds until the job is done. If no worker is online, assume a free one."""
    low, middle, high = estimate.run_seconds_p10, estimate.run_seconds_p50, estimate.run_seconds_p90
    if low is None or middle is None or high is None:
        return None
    queue = estimate.queue_seconds or 0.0
    return queue + low, queue + middle, queue + high


def split_key(key: str, *, gpu_count: int | None = None) -> tuple[str, int | None]:
    """Return the pool and GPU count that an option's key names; `gpu_count` is the count requested beside it.

    Raises InvalidValue if the two differ, or if the key is malformed.
    """
    name, colon, count = key.partition(":")
    if not colon:
        return name, gpu_count
    if not _COUNT.fullmatch(count):
        message = gettext(
            "There is no open GPU pool named '%(key)s'. Use the id of an estimate's option, such as h200:4."
        ) % {"key": key[:60]}
        raise InvalidValue(message, param="compute.pool")
    if gpu_count not in (None, int(count)):
        message = gettext("compute.pool names %(count)s GPUs and gpu_count %(gpu_count)s: leave one of them out.") % {
            "count": count,
            "gpu_count": gpu_count,
        }
        raise InvalidValue(message, param="compute.gpu_count")
    return name, int(count)


def add_remedies(quotes: list[PoolQuote]) -> list[PoolQuote]:
    """Add to each quote that does not fit the changes that make it fit."""
    return [
        replace(quoted, ways=_remedies(quoted, quotes)) if not quoted.estimate.fits else quoted for quoted in quotes
    ]


def _remedies(quoted: PoolQuote, quotes: list[PoolQuote]) -> tuple[Remedy, ...]:
    """Return the estimator's recipe changes, then more GPUs of the pool, then another pool, as quoted.

    A GPU type that no pool offers is named only if no pool can hold the job.
    """
    changes = [_change(fix) for fix in quoted.estimate.fixes if fix.key not in ("gpu", "gpu_count")]
    more = [_more_gpus(other) for other in quotes if other.pool.pk == quoted.pool.pk and other.estimate.fits]
    others = [other for other in quotes if other.gpus_per_node == 1 and other.estimate.fits]
    elsewhere = [_elsewhere(min(others, key=by_use))] if others else []
    unoffered = [
        Remedy(fix=fix, changes={}, pool=None, cost_nano=None, note="No pool here offers it.")
        for fix in quoted.estimate.fixes
        if fix.key == "gpu" and not others
    ]
    return (*changes, *more[:1], *elsewhere, *unoffered)


def _change(fix: Fix) -> Remedy:
    asked = (("method", fix.method), ("max_length", fix.max_length), ("cpu_offload", fix.cpu_offload))
    changes = {name: value for name, value in asked if value is not None}
    return Remedy(fix=fix, changes=changes, pool=None, cost_nano=fix.cost_nano_p50)


def _more_gpus(quoted: PoolQuote) -> Remedy:
    text = f"Use {quoted.gpu_count} GPUs: that needs {gib(quoted.estimate.peak_bytes)} on each"
    fix = Fix(key="gpu_count", text=f"{text}.", peak_bytes=quoted.estimate.peak_bytes, gpu_count=quoted.gpu_count)
    taken = quoted.key if quoted.is_launchable else None
    return Remedy(fix=fix, changes={}, pool=taken, cost_nano=quoted.estimate.cost_nano_p50, note=quoted.block_reason)


def _elsewhere(quoted: PoolQuote) -> Remedy:
    estimate, pool = quoted.estimate, quoted.pool
    text = f"Use {pool.gpu_type.name} in {pool.name}: {gib(estimate.peak_bytes)} of {gib(estimate.capacity_bytes)}."
    fix = Fix(key="gpu", text=text, peak_bytes=estimate.peak_bytes, gpu_key=pool.gpu_type_id)
    taken = quoted.key if quoted.is_launchable else None
    return Remedy(fix=fix, changes={}, pool=taken, cost_nano=estimate.cost_nano_p50, note=quoted.block_reason)
