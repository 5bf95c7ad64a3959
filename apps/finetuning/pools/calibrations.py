"""Calibration versions of a pool: fitted on a schedule, never deleted, chosen by the operator."""

import datetime
from collections.abc import Sequence

import msgspec
from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext

from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.errors import NotFound
from apps.estimates.calibration import MAX_RUNS, PHYSICS, CrossValidation, Observation, cross_validate, fit
from apps.finetuning.lifecycle import CalibrationOutcome
from apps.finetuning.models import CalibrationPoint, CalibrationVersion, GpuPool
from apps.finetuning.pools.grid_points import observe_grid

# Fit a new version when the runs have grown by this share: after every run while they are few, rarely later.
_GROWTH = 0.05


class FittedOn(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a version, and its accuracy on runs it did not see."""

    runs: int
    points: int  # measured on made-up weights, predicted like this pool's quotes
    first_at: datetime.datetime | None
    last_at: datetime.datetime | None
    methods: dict[str, int]
    families: dict[str, int]
    resumed: int  # left out: a resumed attempt warms up twice
    out_of_memory: int  # left out: their real memory need is unknown
    other_physics: int  # left out: measured against other formulas
    time: CrossValidation
    memory: CrossValidation
    beside: CrossValidation = CrossValidation(runs=0, physics=None, calibrated=None)


def refit_pools(*, now: datetime.datetime) -> list[CalibrationVersion]:
    """Fit every pool whose runs have grown enough since its newest version; return the new versions."""
    fitted = [refit_pool(pool_id=pool_id, now=now) for pool_id in GpuPool.objects.values_list("pk", flat=True)]
    return [version for version in fitted if version]


@transaction.atomic
def refit_pool(*, pool_id: str, now: datetime.datetime) -> CalibrationVersion | None:
    """Fit one pool, and use the result unless an operator pinned a version; return None if too little is new."""
    pool = GpuPool.objects.select_for_update(of=("self",)).get(pk=pool_id)
    points = list_points(pool=pool)
    fitting = [
        point
        for point in points
        if point.outcome == CalibrationOutcome.SUCCEEDED and point.attempts == 1 and point.physics == PHYSICS
    ]
    grid = observe_grid(pool=pool)
    newest = pool.calibrations.order_by("-number").first()
    if not (fitting or grid) or not _has_grown(newest, fitting, grid):
        return None
    # Points come first, as if they were the oldest, so that runs replace them over time.
    observations = [*grid, *(_observation(point) for point in fitting)]
    number = newest.number + 1 if newest else 1
    days = {point.created_at.astimezone(datetime.UTC).date() for point in fitting}
    version = CalibrationVersion.objects.create(
        pool=pool,
        number=number,
        calibration=msgspec.to_builtins(fit(observations, number=number, days=len(days))),
        fitted_on=msgspec.to_builtins(_fitted_on(points, fitting, observations)),
        last_point=fitting[-1].pk if fitting else 0,
        created_at=now,
    )
    if pool.calibration_pinned_at is None:
        pool.calibration = version
        pool.save(update_fields=["calibration"])
    audit.record(
        organization=None, by="system", action="calibration.fitted", target=version.pk, pool=pool.name, number=number
    )
    return version


@transaction.atomic
def use_version(*, pool: GpuPool, number: int | None, by: str) -> None:
    """Pin this version for quotes; None pins no calibration. Raises NotFound."""
    version = None if number is None else pool.calibrations.filter(number=number).first()
    if number is not None and version is None:
        raise NotFound(
            gettext("%(name)s has no calibration %(number)s.") % {"name": pool.name, "number": number},
            param="number",
            code="calibration_not_found",
        )
    _choose(pool, version, pinned_at=db_now(), by=by, action="calibration.pinned")


@transaction.atomic
def follow_newest(*, pool: GpuPool, by: str) -> None:
    """Quote with the newest version, and with each later one."""
    _choose(pool, pool.calibrations.order_by("-number").first(), pinned_at=None, by=by, action="calibration.followed")


def list_versions(*, pool: GpuPool) -> QuerySet[CalibrationVersion]:
    """Return the pool's versions, newest first."""
    return pool.calibrations.order_by("-number")


def list_points(*, pool: GpuPool) -> list[CalibrationPoint]:
    """Return the pool's newest points of all tenants, oldest first. The caller runs as the system."""
    return list(CalibrationPoint.objects.filter(pool=pool).order_by("-pk")[: 2 * MAX_RUNS])[::-1]


def _choose(
    pool: GpuPool, version: CalibrationVersion | None, *, pinned_at: datetime.datetime | None, by: str, action: str
) -> None:
    pool.calibration = version
    pool.calibration_pinned_at, pool.calibration_pinned_by = pinned_at, by if pinned_at else None
    pool.save(update_fields=["calibration", "calibration_pinned_at", "calibration_pinned_by"])
    audit.record(
        organization=None, by=by, action=action, target=pool.pk, pool=pool.name, number=version.number if version else 0
    )


def _has_grown(
    newest: CalibrationVersion | None, fitting: Sequence[CalibrationPoint], grid: Sequence[Observation]
) -> bool:
    if newest is None or newest.calibration["physics"] != PHYSICS or newest.fitted_on["points"] != len(grid):
        return True
    fresh = sum(point.pk > newest.last_point for point in fitting)
    return fresh >= max(1.0, _GROWTH * newest.fitted_on["runs"])


def _observation(point: CalibrationPoint) -> Observation:
    return Observation(
        family=point.family,
        method=point.method,
        time_ratio=_ratio(point.actual_seconds, point.estimated_seconds, point.time_factor),
        memory_ratio=_ratio(point.actual_peak_bytes, point.estimated_peak_bytes, point.memory_factor),
        beside_ratio=_ratio(_beside_seconds(point), point.estimated_beside_seconds, point.beside_factor),
    )


def _beside_seconds(point: CalibrationPoint) -> float | None:
    """Return the seconds from the only attempt's claim to its end without its training."""
    if point.wall_seconds is None or point.actual_seconds is None:
        return None
    return max(point.wall_seconds - point.actual_seconds, 0.0)


def _ratio(actual: float | None, estimated: float | None, factor: float) -> float | None:
    """Return actual / physics.

    The estimate includes a correction, which is divided out here; otherwise a fit would correct its own correction.
    """
    return actual * factor / estimated if actual and estimated else None


def _fitted_on(
    points: Sequence[CalibrationPoint], fitting: Sequence[CalibrationPoint], observations: Sequence[Observation]
) -> FittedOn:
    return FittedOn(
        runs=len(fitting),
        points=sum(observation.is_point for observation in observations),
        first_at=fitting[0].created_at if fitting else None,
        last_at=fitting[-1].created_at if fitting else None,
        methods=_count([point.method for point in fitting]),
        families=_count([point.family for point in fitting]),
        resumed=sum(point.outcome == CalibrationOutcome.SUCCEEDED and point.attempts > 1 for point in points),
        out_of_memory=sum(point.outcome == CalibrationOutcome.OUT_OF_MEMORY for point in points),
        other_physics=sum(point.physics != PHYSICS for point in points),
        time=cross_validate(observations, quantity="time_ratio"),
        memory=cross_validate(observations, quantity="memory_ratio"),
        beside=cross_validate(observations, quantity="beside_ratio"),
    )


def _count(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}
