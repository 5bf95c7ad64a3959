"""Replicas and adapters in Prometheus' text format.

An engine's own metrics have one model only, so requests per adapter are counted here from usage series.
"""

import hashlib
import hmac
from collections import defaultdict
from collections.abc import Iterator

from django.conf import settings
from django.db.models import CharField, Count, F, Func, Sum, Value

from apps.billing.models import UsageSeries
from apps.contracts.serving import LoadState
from apps.core.database.clock import db_now
from apps.serving.models import Deployment, LoadedAdapter, MeteringCheck, ReplicaFleet
from apps.serving.placement import demand_after
from apps.serving.ready_replicas import answering, ready_replicas, standing_replicas

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LOAD = {
    "memory_bytes": "Resident memory of the engine's processes.",
    "cached_adapters": "Adapters in the engine's host cache, unloaded ones included.",
    "running": "Requests being answered.",
    "waiting": "Requests waiting, in the engine or for an adapter slot.",
    "tokens_per_second": "Tokens read and written.",
    "kv_cache_share": "Part of the key-value cache in use.",
    "restarts": "Engine starts since the agent's.",
    "disk_bytes": "Adapters in the local cache.",
}
_DIFFERENCE = "Of the last day checked: share of the tokens the engine counted that no gateway metered, or the reverse."
Sample = tuple[dict[str, str], float]


def metrics_token() -> str:
    """Return the bearer token of the metrics endpoint."""
    return hmac.new(settings.SIGNING_KEY.encode(), b"metrics", hashlib.sha256).hexdigest()


def render_metrics() -> str:
    """Return every series in the text format."""
    return "".join(_replicas()) + "".join(_adapters())


def _replicas() -> Iterator[str]:
    replicas = list(standing_replicas().select_related("base_model").order_by("pk"))
    ready = set(ready_replicas().values_list("pk", flat=True))
    labels = {one.pk: {"replica": one.pk, "base_model": one.base_model.name} for one in replicas}
    counts: dict[tuple[str, str], int] = {
        (replica_id, state): count
        for replica_id, state, count in LoadedAdapter.objects.values_list("replica_id", "state").annotate(Count("pk"))
    }
    yield format_series("anneal_replica_ready", "gauge", "1 while requests may be sent to it.", [
        (labels[one.pk] | {"serves": "whole_model" if one.whole_model_id else "adapters"}, float(one.pk in ready))
        for one in replicas
    ])  # fmt: skip
    yield format_series("anneal_replica_faults", "counter", "How often it was found faulty; isolated since the last.", [
        (labels[one.pk], float(one.fault_count)) for one in replicas
    ])  # fmt: skip
    yield format_series("anneal_replica_adapters", "gauge", "Adapters by the state that the replica reports.", [
        (labels[one.pk] | {"state": state}, float(counts.get((one.pk, state), 0)))
        for one in replicas for state in LoadState
    ])  # fmt: skip
    for name, words in _LOAD.items():
        samples = [(labels[one.pk], float(one.load.get(name, 0))) for one in replicas]
        yield format_series(f"anneal_replica_{name}", "gauge", words, samples)
    checks = MeteringCheck.objects.order_by("replica_id", "-day").distinct("replica_id")
    differences = [(labels[one.replica_id], one.difference_share) for one in checks if one.replica_id in labels]
    yield format_series("anneal_replica_metering_difference", "gauge", _DIFFERENCE, differences)
    fleets = list(ReplicaFleet.objects.select_related("base_model", "pool").order_by("pk"))
    yield format_series("anneal_fleet_wanted_replicas", "gauge", "Replicas that requests need within the limits.", [
        ({"pool": one.pool.name, "base_model": one.base_model.name}, float(one.wanted)) for one in fleets
    ])  # fmt: skip


def _adapters() -> Iterator[str]:
    deployments = Deployment.objects.filter(removed_at=None, adapter_version__deleted_at=None).order_by("pk")
    rows = list(
        deployments.values_list(
            "adapter_version_id",
            "adapter_version__model_name",
            "organization__slug",
            "quick_demand",
            "slow_demand",
            "demand_at",
        )
    )
    now = db_now()
    labels = {name: {"model": name, "organization": slug} for _, name, slug, *_ in rows}
    loaded: dict[str, int] = dict(answering().values_list("adapter_version_id").annotate(Count("pk")))
    yield format_series("anneal_adapter_replicas", "gauge", "Replicas that have loaded it: 0 is cold.", [
        (labels[name], float(loaded.get(id, 0))) for id, name, *_ in rows
    ])  # fmt: skip
    yield format_series("anneal_adapter_requests_per_second", "gauge", "What its place is given by.", [
        (labels[name], demand_after(quick, slow, (now - noted_at).total_seconds()) if noted_at else 0.0)
        for _, name, _, quick, slow, noted_at in rows
    ])  # fmt: skip
    used: dict[str, list[Sample]] = defaultdict(list)
    series = UsageSeries.objects.filter(subject__in=labels, sku__startswith="inference:")
    way = Func(F("sku"), Value(":"), Value(2), function="split_part", output_field=CharField())
    ways = series.annotate(way=way).values_list("subject", "way").order_by("subject")
    for subject, direction, tokens, requests in ways.annotate(Sum("quantity"), Sum("request_count")):
        used["tokens"].append((labels[subject] | {"direction": direction}, float(tokens)))
        if direction == "input":  # every request has one input line
            used["requests"].append((labels[subject], float(requests)))
    yield format_series("anneal_adapter_requests_total", "counter", "Requests answered and metered.", used["requests"])
    yield format_series("anneal_adapter_tokens_total", "counter", "Tokens metered.", used["tokens"])


def format_series(name: str, kind: str, words: str, samples: list[Sample]) -> str:
    """Return one series in the text format."""
    lines = [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{{{_labels(labels)}}} {value:.10g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
