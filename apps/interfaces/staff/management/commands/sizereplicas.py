"""`manage.py sizereplicas`: how many replicas of a base model a recorded day needs."""

import datetime
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from apps.catalog.models import BaseModel
from apps.core.database.clock import db_now
from apps.estimates.physics.engine_replay import ServingEstimate
from apps.estimates.physics.engine_speeds import TooFewRequests
from apps.interfaces.staff.management.replica_sizing import recorded_requests, size_replicas

_DAY = datetime.timedelta(days=1)


class Command(BaseCommand):
    help = "Replay a recorded day of a base model on 1, 2, … replicas, and recommend a number of them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("base_model", help="its name")
        day = "in UTC, such as 2026-11-30; default: the last 24 hours"
        parser.add_argument("--day", type=datetime.date.fromisoformat, help=day)
        parser.add_argument("--first-token-ms", type=_positive, default=500, help="the p95 to reach")
        parser.add_argument("--most", type=_positive, default=32, help="the most replicas to replay")
        parser.add_argument("--max-sequences", type=_positive, default=256, help="--max-num-seqs of the engine")
        parser.add_argument(
            "--tokens-per-step", type=_positive, default=2048, help="--max-num-batched-tokens of the engine"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        base_model = BaseModel.objects.filter(name=options["base_model"]).first()
        if base_model is None:
            raise CommandError(f"There is no base model {options['base_model']}.")
        until = db_now()
        if options["day"]:
            until = datetime.datetime.combine(options["day"], datetime.time(), datetime.UTC) + _DAY
        recorded = recorded_requests(base_model=base_model, since=until - _DAY, until=until)
        target = options["first_token_ms"] / 1000
        try:
            sizing = size_replicas(
                recorded, first_token_p95=target, most=options["most"],
                max_sequences=options["max_sequences"], tokens_per_step=options["tokens_per_step"],
            )  # fmt: skip
        except TooFewRequests as error:
            raise CommandError(str(error)) from error
        replayed = sizing.replayed.first_token_p95
        difference = f" ({replayed / sizing.recorded_p95 - 1:+.0%})" if sizing.recorded_p95 else ""
        self.stdout.write(
            f"{sizing.requests:,} requests on {_replicas(sizing.replicas)}: 95 % of first tokens within "
            f"{_ms(sizing.recorded_p95)}. The replay says {_ms(replayed)}{difference}."
        )
        for each in sizing.estimates:
            self.stdout.write(_line(each))
        last = sizing.estimates[-1]
        if last.first_token_p95 > target:
            raise CommandError(f"The target of {_ms(target)} is not reached with {_replicas(last.replicas)}.")
        self.stdout.write(f"Recommended for {_ms(target)}: {_replicas(last.replicas)}.")


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def _line(each: ServingEstimate) -> str:
    times = f"p50 {_ms(each.first_token_p50)}, p95 {_ms(each.first_token_p95)}"
    return f"{_replicas(each.replicas)}: {times}, {each.busy_share:.0%} busy"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
