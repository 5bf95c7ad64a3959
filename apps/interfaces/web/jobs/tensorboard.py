"""A job's metrics as a TensorBoard event file to download."""

from django.http import StreamingHttpResponse
from django.views.decorators.http import require_safe

from apps.accounts.roles import Permission
from apps.core.objects.downloads import stream_download
from apps.finetuning import queries
from apps.finetuning.results.tensorboard import event_file, file_name, read_points
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view


@require_safe
@organization_view(Permission.VIEW)
def download(request: OrganizationRequest, job_id: str) -> StreamingHttpResponse:
    job = queries.get_job(organization=request.organization, id=job_id)
    records = event_file(read_points(job=job), began_at=job.created_at.timestamp())
    return stream_download(request, records, filename=file_name(job), content_type="application/octet-stream")
