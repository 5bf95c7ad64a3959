"""Search for the command palette of operators: organizations, GPU pools and workers, and jobs by their whole id."""

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from apps.accounts.models import Organization
from apps.core.database.search import Hit, HitKind, render_hits
from apps.core.messages.translation import later
from apps.finetuning.models import FineTuningJob, Worker
from apps.finetuning.queries import list_pools
from apps.interfaces.staff.access import operator_view


@never_cache
@require_safe
@operator_view
def show(request: HttpRequest) -> HttpResponse:
    organizations = HitKind(
        later("Organizations"),
        "building-2",
        Organization.objects.order_by("name", "id"),
        ("name", "slug", "id"),
        lambda row: Hit(row.name, str(row.pk), reverse("staff:organization_detail", args=[row.pk])),
    )
    pools = HitKind(
        later("GPU pools"),
        "server",
        list_pools(),
        ("name", "gpu_type__name", "id"),
        lambda row: Hit(row.name, row.gpu_type.name, reverse("staff:pool_detail", args=[row.pk])),
    )
    workers = HitKind(
        later("Workers"),
        "cpu",
        Worker.objects.filter(revoked_at=None).select_related("pool").order_by("hostname", "id"),
        ("hostname", "id"),
        lambda row: Hit(row.hostname, row.pool.name, reverse("staff:worker_detail", args=[row.pk])),
    )
    jobs = HitKind(
        later("Jobs"),
        "workflow",
        FineTuningJob.objects.filter(pk__in=request.GET.get("q", "").split()).select_related("organization"),
        ("id",),
        lambda row: Hit(str(row.pk), row.organization.name, reverse("staff:job_detail", args=[row.pk])),
    )
    return render_hits(request, [organizations, pools, workers, jobs], prefix="found-staff")
