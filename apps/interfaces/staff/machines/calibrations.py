"""The calibrations of a pool: its versions, and selecting one or none."""

import math

import msgspec
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_POST, require_safe

from apps.core.errors import InvalidValue
from apps.core.messages.translation import later
from apps.core.objects.page_tables import rows_at_once
from apps.estimates.calibration import PHYSICS, Calibration
from apps.finetuning import queries
from apps.finetuning.models import CalibrationVersion, GpuPool, PoolAccuracy
from apps.finetuning.pools import accuracy, calibrations
from apps.finetuning.quotes.pool_facts import list_shape_probes
from apps.interfaces.staff.access import operator_id, operator_view

_SHOWN = 50
_LEFT_OUT = (
    ("resumed", "resumed"),
    ("out_of_memory", later("out of memory")),
    ("other_physics", later("other formulas")),
)


@require_safe
@operator_view
def index(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Show a pool's versions, the errors of its estimates, and its grid points."""
    pool = get_object_or_404(queries.list_pools().select_related("calibration"), pk=pool_id)
    points = calibrations.list_points(pool=pool)
    report, shown = accuracy.measure(points), rows_at_once(request, "calibrations", _SHOWN)
    context = {
        "pool": pool,
        "report": report,
        "rows": accuracy.list_errors(report),
        "chart": accuracy.draw_running_error(report),
        "versions": [_version(pool, version) for version in calibrations.list_versions(pool=pool)[:shown]],
        "shapes": list_shape_probes(pool=pool),
        "is_public": PoolAccuracy.objects.filter(pool=pool).exists(),
        "window_runs": accuracy.WINDOW_RUNS,
    }
    return render(request, "staff/machines/calibrations.html", context)


@require_POST
@operator_view
def use(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Quote with the version `number`, or with none if it is empty."""
    pool = get_object_or_404(queries.list_pools(), pk=pool_id)
    text = request.POST.get("number", "")
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidValue(gettext("A version is a whole number."), param="number")
    number = int(text) if text else None
    calibrations.use_version(pool=pool, number=number, by=operator_id(request))
    what = gettext("no calibration") if number is None else gettext("calibration %(number)s") % {"number": number}
    messages.success(
        request,
        gettext("Quotes of %(name)s use %(what)s until you choose otherwise.") % {"name": pool.name, "what": what},
    )
    return redirect("staff:pool_calibrations", pool_id=pool.pk)


@require_POST
@operator_view
def follow(request: HttpRequest, pool_id: str) -> HttpResponse:
    """Always quote with the newest version."""
    pool = get_object_or_404(queries.list_pools(), pk=pool_id)
    calibrations.follow_newest(pool=pool, by=operator_id(request))
    messages.success(request, gettext("Quotes of %(name)s use its newest calibration.") % {"name": pool.name})
    return redirect("staff:pool_calibrations", pool_id=pool.pk)


def _version(pool: GpuPool, version: CalibrationVersion) -> dict[str, object]:
    calibration = msgspec.convert(version.calibration, Calibration)
    fitted_on = msgspec.convert(version.fitted_on, calibrations.FittedOn)
    left_out = [f"{getattr(fitted_on, name)} {words}" for name, words in _LEFT_OUT if getattr(fitted_on, name)]
    return {
        "version": version,
        "number": version.number,
        "is_used": pool.calibration_id == version.pk,
        "is_stale": calibration.physics != PHYSICS,
        "fitted_on": fitted_on,
        "time": math.exp(calibration.time.pool),
        "memory": math.exp(calibration.memory.pool),
        "beside": math.exp(calibration.beside.pool),
        "groups": [*fitted_on.methods.items(), *fitted_on.families.items()],
        "left_out": ", ".join(left_out),
    }
