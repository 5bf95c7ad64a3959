"""The public API: OpenAI's surface under /v1, ours under /api/v1. No trailing slash: a redirect loses a POST's body."""

from django.urls import path

from apps.interfaces.api import schema
from apps.interfaces.api.native import (
    adapters,
    audit,
    estimates,
    integrations,
    keys,
    me,
    members,
    serving,
    usage,
    webhooks,
)
from apps.interfaces.api.native.datasets import columns, library, revisions
from apps.interfaces.api.native.models import (
    conversions,
    hub_pushes,
    licences,
    limits,
    model_files,
    retraining_plans,
)
from apps.interfaces.api.native.money import billing, costs, invoices, ledger
from apps.interfaces.api.native.organization import projects, service_accounts, settings
from apps.interfaces.api.openai import (
    batches,
    checkpoint_permissions,
    evals,
    files,
    fine_tuning,
    graders,
    models,
    stored_completions,
    uploads,
    webhook_endpoints,
)
from apps.interfaces.api.requests.unknown_urls import WITHOUT_V1, unknown_url

_JOB = "v1/fine_tuning/jobs/<str:job_id>"
_COMPLETION = "v1/chat/completions/<str:completion_id>"
_RUN = "v1/evals/<str:eval_id>/runs/<str:run_id>"
_PERMISSIONS = "v1/fine_tuning/checkpoints/<path:model>/permissions"
_GRADERS = "v1/fine_tuning/alpha/graders"
_PROJECT = "api/v1/projects/<str:project_id>"
_SERVICE_ACCOUNT = "api/v1/service-accounts/<str:service_account_id>"
_PLAN = "api/v1/fine_tuning/retraining_plans/<str:plan_id>"
_ENDPOINT = "v1/webhook_endpoints/<str:webhook_id>"
_WEBHOOK = "api/v1/webhooks/<str:webhook_id>"
_FILE = "api/v1/files/<str:file_id>"
_CREDIT_REQUEST = "api/v1/credit-requests/<str:request_id>"
_INVOICE = "api/v1/invoices/<str:invoice_id>"

urlpatterns = [
    path("v1/files", files.FileList.as_view(), name="api_file_list"),
    path("v1/files/<str:file_id>", files.FileDetail.as_view(), name="api_file_detail"),
    path("v1/files/<str:file_id>/content", files.FileContent.as_view(), name="api_file_content"),
    path("v1/uploads", uploads.UploadList.as_view(), name="api_upload_list"),
    path("v1/uploads/<str:upload_id>/parts", uploads.UploadParts.as_view(), name="api_upload_parts"),
    path("v1/uploads/<str:upload_id>/complete", uploads.UploadComplete.as_view(), name="api_upload_complete"),
    path("v1/uploads/<str:upload_id>/cancel", uploads.UploadCancel.as_view(), name="api_upload_cancel"),
    path("v1/batches", batches.BatchList.as_view(), name="api_batch_list"),
    path("v1/batches/<str:batch_id>", batches.BatchDetail.as_view(), name="api_batch_detail"),
    path("v1/batches/<str:batch_id>/cancel", batches.BatchCancel.as_view(), name="api_batch_cancel"),
    path("v1/chat/completions", stored_completions.StoredCompletionList.as_view(), name="api_completion_list"),
    path(_COMPLETION, stored_completions.StoredCompletionDetail.as_view(), name="api_completion_detail"),
    path(
        f"{_COMPLETION}/messages",
        stored_completions.StoredCompletionMessages.as_view(),
        name="api_completion_messages",
    ),
    path("v1/evals", evals.EvalList.as_view(), name="api_eval_list"),
    path("v1/evals/<str:eval_id>", evals.EvalDetail.as_view(), name="api_eval_detail"),
    path("v1/evals/<str:eval_id>/runs", evals.EvalRunList.as_view(), name="api_eval_run_list"),
    path(_RUN, evals.EvalRunDetail.as_view(), name="api_eval_run_detail"),
    path(f"{_RUN}/cancel", evals.EvalRunCancel.as_view(), name="api_eval_run_cancel"),
    path(f"{_RUN}/output_items", evals.OutputItemList.as_view(), name="api_output_item_list"),
    path(f"{_RUN}/output_items/<str:output_item_id>", evals.OutputItemDetail.as_view(), name="api_output_item_detail"),
    path("v1/webhook_endpoints", webhook_endpoints.EndpointList.as_view(), name="api_endpoint_list"),
    path(_ENDPOINT, webhook_endpoints.EndpointDetail.as_view(), name="api_endpoint_detail"),
    path(f"{_ENDPOINT}/rotate_secret", webhook_endpoints.EndpointRotation.as_view(), name="api_endpoint_rotate"),
    path(f"{_ENDPOINT}/test", webhook_endpoints.EndpointTest.as_view(), name="api_endpoint_test"),
    path("v1/webhook_event_types", webhook_endpoints.EventTypeNames.as_view(), name="api_event_types"),
    path("v1/models", models.ModelList.as_view(), name="api_model_list"),
    path("v1/models/<path:model>", models.ModelDetail.as_view(), name="api_model_detail"),
    path("v1/fine_tuning/jobs", fine_tuning.JobList.as_view(), name="api_job_list"),
    path(_JOB, fine_tuning.JobDetail.as_view(), name="api_job_detail"),
    path(f"{_JOB}/cancel", fine_tuning.JobCancel.as_view(), name="api_job_cancel"),
    path(f"{_JOB}/pause", fine_tuning.JobPause.as_view(), name="api_job_pause"),
    path(f"{_JOB}/resume", fine_tuning.JobResume.as_view(), name="api_job_resume"),
    path(f"{_JOB}/events", fine_tuning.JobEvents.as_view(), name="api_job_events"),
    path(f"{_JOB}/checkpoints", fine_tuning.JobCheckpoints.as_view(), name="api_job_checkpoints"),
    path(_PERMISSIONS, checkpoint_permissions.CheckpointPermissions.as_view(), name="api_checkpoint_permissions"),
    path(
        f"{_PERMISSIONS}/<str:permission_id>",
        checkpoint_permissions.CheckpointPermission.as_view(),
        name="api_checkpoint_permission",
    ),
    path(f"{_GRADERS}/validate", graders.GraderValidation.as_view(), name="api_grader_validate"),
    path(f"{_GRADERS}/run", graders.GraderRun.as_view(), name="api_grader_run"),
    path(f"api/{_JOB}/moves", fine_tuning.JobMoves.as_view(), name="api_job_moves"),
    path(f"api/{_JOB}/retry", fine_tuning.JobRetry.as_view(), name="api_job_retry"),
    path(f"api/{_JOB}/tensorboard", fine_tuning.JobTensorBoard.as_view(), name="api_job_tensorboard"),
    path(
        "api/v1/fine_tuning/retraining_plans",
        retraining_plans.RetrainingPlanList.as_view(),
        name="api_retraining_plan_list",
    ),
    path(_PLAN, retraining_plans.RetrainingPlanDetail.as_view(), name="api_retraining_plan_detail"),
    path(f"{_PLAN}/retrainings", retraining_plans.RetrainingList.as_view(), name="api_retraining_list"),
    path("api/v1/audit", audit.AuditLog.as_view(), name="api_audit"),
    path("api/v1/billing", billing.BillingView.as_view(), name="api_billing"),
    path("api/v1/billing/profile", invoices.ProfileView.as_view(), name="api_billing_profile"),
    path("api/v1/invoices", invoices.InvoiceList.as_view(), name="api_invoice_list"),
    path(_INVOICE, invoices.InvoiceDetail.as_view(), name="api_invoice_detail"),
    path(f"{_INVOICE}/lines", invoices.InvoiceLines.as_view(), name="api_invoice_lines"),
    path(f"{_INVOICE}/csv", invoices.InvoiceCsv.as_view(), name="api_invoice_csv"),
    path(f"{_INVOICE}/pdf", invoices.InvoicePdf.as_view(), name="api_invoice_pdf"),
    path("api/v1/ledger", ledger.LedgerList.as_view(), name="api_ledger"),
    path("api/v1/prices", ledger.PriceList.as_view(), name="api_price_list"),
    path("api/v1/costs", costs.Costs.as_view(), name="api_costs"),
    path("api/v1/credit-requests", ledger.CreditRequestList.as_view(), name="api_credit_request_list"),
    path(
        "api/v1/credit-requests/<str:request_id>",
        ledger.CreditRequestDetail.as_view(),
        name="api_credit_request_detail",
    ),
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
    path(
        "api/v1/models/<path:model>/conversions", conversions.ModelConversions.as_view(), name="api_model_conversions"
    ),
    path(
        "api/v1/models/<path:model>/conversions/<str:conversion_id>/cancel",
        conversions.ModelConversionCancel.as_view(),
        name="api_model_conversion_cancel",
    ),
    path("api/v1/models/<path:model>/pushes", hub_pushes.ModelPushes.as_view(), name="api_model_pushes"),
    path("api/v1/models/<path:model>/licence", licences.ModelLicence.as_view(), name="api_model_licence"),
    path(f"{_FILE}/columns", columns.FileColumns.as_view(), name="api_file_columns"),
    path(f"{_FILE}/repair", columns.FileRepair.as_view(), name="api_file_repair"),
    path("api/v1/integrations", integrations.IntegrationList.as_view(), name="api_integration_list"),
    path("api/v1/integrations/<str:kind>", integrations.IntegrationDetail.as_view(), name="api_integration_detail"),
    path("api/v1/datasets", library.DatasetList.as_view(), name="api_dataset_list"),
    path("api/v1/datasets/<str:dataset_id>", library.DatasetDetail.as_view(), name="api_dataset_detail"),
    path(
        "api/v1/datasets/<str:dataset_id>/versions",
        library.DatasetVersionList.as_view(),
        name="api_dataset_version_list",
    ),
    path(f"{_FILE}/rows", library.FileRows.as_view(), name="api_file_rows"),
    path(f"{_FILE}/findings", library.FileFindings.as_view(), name="api_file_findings"),
    path(f"{_FILE}/edits", revisions.FileRowEdits.as_view(), name="api_file_edits"),
    path(f"{_FILE}/restore", revisions.FileRestore.as_view(), name="api_file_restore"),
    path(f"{_FILE}/split", revisions.FileSplit.as_view(), name="api_file_split"),
    path(f"{_FILE}/changes", revisions.FileChanges.as_view(), name="api_file_changes"),
    path("api/v1/adapters", adapters.AdapterList.as_view(), name="api_adapter_list"),
    path("api/v1/adapters/<str:version_id>", adapters.AdapterDetail.as_view(), name="api_adapter_detail"),
    path("api/v1/keys", keys.KeyList.as_view(), name="api_key_list"),
    path("api/v1/keys/<str:key_id>", keys.KeyDetail.as_view(), name="api_key_detail"),
    path("api/v1/keys/<str:key_id>/labels", keys.KeyLabels.as_view(), name="api_key_labels"),
    path("api/v1/keys/<str:key_id>/rotate", keys.KeyRotation.as_view(), name="api_key_rotate"),
    path("api/v1/members", members.MemberList.as_view(), name="api_member_list"),
    path("api/v1/members/<str:membership_id>", members.MemberDetail.as_view(), name="api_member_detail"),
    path("api/v1/invitations", members.InvitationList.as_view(), name="api_invitation_list"),
    path("api/v1/invitations/<str:invitation_id>", members.InvitationDetail.as_view(), name="api_invitation_detail"),
    path("api/v1/organization", settings.OrganizationView.as_view(), name="api_organization"),
    path("api/v1/projects", projects.ProjectList.as_view(), name="api_project_list"),
    path(_PROJECT, projects.ProjectDetail.as_view(), name="api_project_detail"),
    path(f"{_PROJECT}/archive", projects.ProjectArchive.as_view(), name="api_project_archive"),
    path(f"{_PROJECT}/members", projects.ProjectMembers.as_view(), name="api_project_members"),
    path(f"{_PROJECT}/members/<str:member_id>", projects.ProjectMemberDetail.as_view(), name="api_project_member"),
    path("api/v1/service-accounts", service_accounts.ServiceAccountList.as_view(), name="api_service_account_list"),
    path(
        _SERVICE_ACCOUNT,
        service_accounts.ServiceAccountDetail.as_view(),
        name="api_service_account_detail",
    ),
    path(
        f"{_SERVICE_ACCOUNT}/keys",
        service_accounts.ServiceAccountKeys.as_view(),
        name="api_service_account_keys",
    ),
    path("api/v1/notifications", members.NotificationList.as_view(), name="api_notification_list"),
    path("api/v1/budgets", usage.BudgetList.as_view(), name="api_budget_list"),
    path("api/v1/budgets/<str:budget_id>", usage.BudgetDetail.as_view(), name="api_budget_detail"),
    path("api/v1/allowances", usage.AllowanceList.as_view(), name="api_allowance_list"),
    path("api/v1/allowances/<str:allowance_id>", usage.AllowanceDetail.as_view(), name="api_allowance_detail"),
    path("api/v1/quotas", usage.QuotaList.as_view(), name="api_quota_list"),
    path("api/v1/usage", usage.UsageList.as_view(), name="api_usage"),
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
