"""The estimates for each GPU type and count, and the choice among them."""

from collections.abc import Iterable
from dataclasses import dataclass

from apps.estimates.physics.gpus import Gpu
from apps.estimates.quote import Estimate
from apps.estimates.ranking import RankedOption, Ranking, rank
from apps.interfaces.cli.catalog import HourlyPrice


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The estimate for one GPU type and count, shared evenly by `node_count` machines."""

    gpu: Gpu
    price: HourlyPrice | None
    estimate: Estimate
    node_count: int = 1

    @property
    def key(self) -> str:
        count = self.estimate.gpu_count
        return self.gpu.key if count == 1 else f"{self.gpu.key}:{count}"


def rank_answers(answers: Iterable[Answer], *, within_hours: float | None) -> Ranking:
    """Rank the answers that have a time and a price. There is no queue here."""
    choices = []
    for answer in answers:
        estimate = answer.estimate
        seconds, late, cost = estimate.run_seconds_p50, estimate.run_seconds_p90, estimate.cost_nano_p50
        if seconds is not None and late is not None and cost is not None:
            choice = RankedOption(key=answer.key, cost_nano=cost, finish_seconds_p50=seconds, finish_seconds_p90=late)
            choices.append(choice)
    return rank(choices, deadline_seconds=None if within_hours is None else within_hours * 3600)
