"""How many replicas a recorded day needs: the recorded requests, and a replay of them."""

import datetime
from collections import Counter, defaultdict

import msgspec

from apps.billing.models import UsageEvent
from apps.catalog.models import BaseModel
from apps.core.database.tenancy import system
from apps.estimates.physics.engine_replay import ServingEstimate, percentile, predict, recommend
from apps.estimates.physics.engine_speeds import EngineSpeeds, RecordedRequest, fit_speeds
from apps.serving.models import Replica

_SPAN_SECONDS = 600.0


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded day, its replay on as many replicas, and the estimates up to the target. Times are in seconds.

    `replicas` is the most that answered in the same ten minutes: a fleet starts and stops replicas all day.
    """

    requests: int
    replicas: int
    recorded_p95: float
    speeds: EngineSpeeds
    replayed: ServingEstimate
    estimates: list[ServingEstimate]


def recorded_requests(
    *, base_model: BaseModel, since: datetime.datetime, until: datetime.datetime
) -> dict[str, list[RecordedRequest]]:
    """Return the requests that each replica of the base model answered in this time, by the replica's id.

    Replicas of a whole model count for themselves, and not here.
    """
    found: dict[str, list[RecordedRequest]] = defaultdict(list)
    with system():
        replicas = [*Replica.objects.filter(base_model=base_model, whole_model=None).values_list("pk", flat=True)]
        rows = UsageEvent.objects.filter(
            occurred_at__gte=since, occurred_at__lt=until, replica_id__in=replicas, request_count=1,
            first_token_ms__isnull=False, engine_output_tokens__gte=1,
        ).only(
            "occurred_at", "latency_ms", "first_token_ms", "engine_input_tokens", "cached_input_tokens",
            "engine_output_tokens", "replica_id",
        )  # fmt: skip
        for row in rows.iterator():
            found[row.replica_id].append(
                RecordedRequest(
                    at=row.occurred_at.timestamp() - row.latency_ms / 1000,
                    first_token_seconds=(row.first_token_ms or 0) / 1000,
                    seconds=row.latency_ms / 1000,
                    prompt_tokens=max(row.engine_input_tokens - row.cached_input_tokens, 1),
                    output_tokens=row.engine_output_tokens,
                )
            )
    return dict(found)


def size_replicas(
    by_replica: dict[str, list[RecordedRequest]], *, first_token_p95: float, most: int, **limits: int
) -> Sizing:
    """Fit the engine's speeds to the replica with the most requests, and replay all requests.

    `limits` are those of EngineSpeeds. Raises TooFewRequests.
    """
    busiest = max(by_replica.values(), key=len, default=[])
    speeds = fit_speeds(busiest, **limits)
    requests = [request for each in by_replica.values() for request in each]
    replicas = _most_at_once(by_replica)
    return Sizing(
        requests=len(requests),
        replicas=replicas,
        recorded_p95=percentile((each.first_token_seconds for each in requests), 0.95),
        speeds=speeds,
        replayed=predict(requests, speeds, replicas=replicas),
        estimates=recommend(requests, speeds, first_token_p95=first_token_p95, most=most),
    )


def _most_at_once(by_replica: dict[str, list[RecordedRequest]]) -> int:
    """Return the most replicas that answered requests in one span of ten minutes."""
    spans = Counter(span for each in by_replica.values() for span in {int(one.at // _SPAN_SECONDS) for one in each})
    return max(spans.values())
