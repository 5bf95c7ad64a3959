"""The public page that compares the installation's estimates with actual runs. It names no tenant."""

import msgspec
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from apps.core.database.tenancy import tenant
from apps.finetuning.models import PoolAccuracy
from apps.finetuning.pools.accuracy import (
    MIN_ORGANIZATIONS,
    MIN_RUNS,
    STEP_RUNS,
    WINDOW_RUNS,
    AccuracyReport,
    draw_running_error,
    list_errors,
    list_public_reports,
)
from apps.interfaces.web.shell.access import public_view


@public_view
@require_safe
def show(request: HttpRequest) -> HttpResponse:
    """Show every pool with enough runs and organizations. No sign-in is needed."""
    with tenant():  # without an organization, so that row-level security hides all tenants' rows
        pools = [_pool(row) for row in list_public_reports()]
    context = {
        "pools": pools,
        "min_runs": MIN_RUNS,
        "min_organizations": MIN_ORGANIZATIONS,
        "step_runs": STEP_RUNS,
        "window_runs": WINDOW_RUNS,
    }
    return render(request, "jobs/accuracy.html", context)


def _pool(row: PoolAccuracy) -> dict[str, object]:
    report = msgspec.convert(row.report, AccuracyReport)
    return {
        "pool": row.pool,
        "report": report,
        "rows": list_errors(report),
        "chart": draw_running_error(report),
    }
