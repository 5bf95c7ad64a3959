"""The public API: OpenAI's surface under /v1, ours under /api/v1. No trailing slash: a redirect loses a POST's body."""

from django.urls import path

from apps.interfaces.api import schema
from apps.interfaces.api.native import (
    audit,
    billing,
    datasets,
    estimates,
    integrations,
    licences,
    limits,
    me,
    model_files,
    serving,
    webhooks,
)
from apps.interfaces.api.openai import files, fine_tuning, models, uploads
from apps.interfaces.api.requests.unknown_urls import WITHOUT_V1, unknown_url

_JOB = "v1/fine_tuning/jobs/<str:job_id>"
_WEBHOOK = "api/v1/webhooks/<str:webhook_id>"

urlpatterns = [
    path("v1/files", files.FileList.as_view(), name="api_file_list"),
    path("v1/files/<str:file_id>", files.FileDetail.as_view(), name="api_file_detail"),
    path("v1/files/<str:file_id>/content", files.FileContent.as_view(), name="api_file_content"),
    path("v1/uploads", uploads.UploadList.as_view(), name="api_upload_list"),
    path("v1/uploads/<str:upload_id>/parts", uploads.UploadParts.as_view(), name="api_upload_parts"),
    path("v1/uploads/<str:upload_id>/complete", uploads.UploadComplete.as_view(), name="api_upload_complete"),
    path("v1/uploads/<str:upload_id>/cancel", uploads.UploadCancel.as_view(), name="api_upload_cancel"),
    path("v1/models", models.ModelList.as_view(), name="api_model_list"),
    path("v1/models/<path:model>", models.ModelDetail.as_view(), name="api_model_detail"),
    path("v1/fine_tuning/jobs", fine_tuning.JobList.as_view(), name="api_job_list"),
    path(_JOB, fine_tuning.JobDetail.as_view(), name="api_job_detail"),
    path(f"{_JOB}/cancel", fine_tuning.JobCancel.as_view(), name="api_job_cancel"),
    path(f"{_JOB}/pause", fine_tuning.JobPause.as_view(), name="api_job_pause"),
    path(f"{_JOB}/resume", fine_tuning.JobResume.as_view(), name="api_job_resume"),
    path(f"{_JOB}/events", fine_tuning.JobEvents.as_view(), name="api_job_events"),
    path(f"{_JOB}/checkpoints", fine_tuning.JobCheckpoints.as_view(), name="api_job_checkpoints"),
    path(f"api/{_JOB}/retry", fine_tuning.JobRetry.as_view(), name="api_job_retry"),
    path(f"api/{_JOB}/tensorboard", fine_tuning.JobTensorBoard.as_view(), name="api_job_tensorboard"),
    path("api/v1/audit", audit.AuditLog.as_view(), name="api_audit"),
    path("api/v1/billing", billing.BillingView.as_view(), name="api_billing"),
    path("api/v1/estimates", estimates.Estimates.as_view(), name="api_estimates"),
    path("api/v1/models/<path:model>/limits", limits.ModelLimits.as_view(), name="api_model_limits"),
    path("api/v1/models/<path:model>/serving", serving.ModelServing.as_view(), name="api_model_serving"),
    path("api/v1/aliases", serving.AliasList.as_view(), name="api_alias_list"),
    path("api/v1/aliases/<str:alias_id>", serving.AliasDetail.as_view(), name="api_alias_detail"),
    path(
        "api/v1/checkpoints/<str:checkpoint_id>/serve",
        fine_tuning.CheckpointServing.as_view(),
        name="api_checkpoint_serve",
    ),
    path("api/v1/aliases/<str:alias_id>/rollback", serving.AliasRollback.as_view(), name="api_alias_rollback"),
    path("api/v1/models/<path:model>/files", model_files.ModelFileList.as_view(), name="api_model_file_list"),
    path("api/v1/models/<path:model>/files/<str:name>", model_files.ModelFileContent.as_view(), name="api_model_file"),
    path("api/v1/models/<path:model>/licence", licences.ModelLicence.as_view(), name="api_model_licence"),
    path("api/v1/files/<str:file_id>/columns", datasets.FileColumns.as_view(), name="api_file_columns"),
    path("api/v1/files/<str:file_id>/repair", datasets.FileRepair.as_view(), name="api_file_repair"),
    path("api/v1/integrations", integrations.IntegrationList.as_view(), name="api_integration_list"),
    path("api/v1/integrations/<str:kind>", integrations.IntegrationDetail.as_view(), name="api_integration_detail"),
    path("api/v1/me", me.MeView.as_view(), name="api_me"),
    path("api/v1/webhooks", webhooks.WebhookList.as_view(), name="api_webhook_list"),
    path(_WEBHOOK, webhooks.WebhookDetail.as_view(), name="api_webhook_detail"),
    path(f"{_WEBHOOK}/rotate", webhooks.WebhookRotation.as_view(), name="api_webhook_rotate"),
    path(f"{_WEBHOOK}/test", webhooks.WebhookTest.as_view(), name="api_webhook_test"),
    path(f"{_WEBHOOK}/deliveries", webhooks.WebhookDeliveries.as_view(), name="api_webhook_deliveries"),
    path(
        f"{_WEBHOOK}/deliveries/<str:delivery_id>/replay",
        webhooks.WebhookReplay.as_view(),
        name="api_webhook_replay",
    ),
    path("api/v1/schema", schema.show, name="api_schema"),
    # Last: unknown addresses get an OpenAI-shaped 404, in debug mode too.
    path("v1/<path:rest>", unknown_url, name="api_unknown_v1"),
    path("api/<path:rest>", unknown_url, name="api_unknown"),
    *(path(first, unknown_url, name="api_without_v1") for first in ("v1", "api", *WITHOUT_V1)),
    *(path(f"{first}/<path:rest>", unknown_url, name="api_without_v1") for first in WITHOUT_V1),
]
