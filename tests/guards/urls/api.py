"""The addresses for programs: who may use each, and what to send there."""

from apps.accounts.roles import Permission as P  # noqa: N817 - one line per address
from tests.guards.urls.kinds import (
    ALIAS,
    BATCH,
    FILE,
    JOB,
    NEW_WEBHOOK,
    PLAN,
    PROJECT,
    PROJECT_MEMBER,
    SERVICE_ACCOUNT,
    UPLOAD,
    WEBHOOK,
    Url,
    api,
    public,
    signed,
)

COMPLETION = {"completion_id": "completion"}
EVAL = {"eval_id": "eval"}
INVOICE = {"invoice_id": "invoice"}
RUN = EVAL | {"run_id": "eval_run"}
GRADING = {"grader": {"type": "string_check", "name": "a", "input": "red", "reference": "red", "operation": "eq"}}

API: dict[str, Url] = {
    "api_audit": api(GET=P.AUDIT_READ),
    "api_webhook_list": api(
        GET=P.WEBHOOK_MANAGE,
        POST=P.WEBHOOK_MANAGE,
        data=NEW_WEBHOOK,
    ),
    "api_webhook_detail": api(
        GET=P.WEBHOOK_MANAGE, POST=P.WEBHOOK_MANAGE, DELETE=P.WEBHOOK_MANAGE, ids=WEBHOOK, data={"format": "slack"}
    ),
    "api_webhook_rotate": api(POST=P.WEBHOOK_MANAGE, ids=WEBHOOK),
    "api_webhook_test": api(POST=P.WEBHOOK_MANAGE, ids=WEBHOOK),
    "api_webhook_deliveries": api(GET=P.WEBHOOK_MANAGE, ids=WEBHOOK),
    "api_webhook_replay": api(POST=P.WEBHOOK_MANAGE, ids=WEBHOOK | {"delivery_id": "webhook_delivery"}),
    "api_endpoint_list": api(
        GET=P.WEBHOOK_MANAGE,
        POST=P.WEBHOOK_MANAGE,
        data={"name": "a", "url": "https://hooks.example.com/anneal", "event_types": ["batch.completed"]},
    ),
    "api_endpoint_detail": api(
        GET=P.WEBHOOK_MANAGE, POST=P.WEBHOOK_MANAGE, DELETE=P.WEBHOOK_MANAGE, ids=WEBHOOK, data={"name": "other"}
    ),
    "api_endpoint_rotate": api(POST=P.WEBHOOK_MANAGE, ids=WEBHOOK),
    "api_endpoint_test": api(POST=P.WEBHOOK_MANAGE, ids=WEBHOOK, data={"event_type": "batch.completed"}),
    "api_event_types": api(GET=P.WEBHOOK_MANAGE),
    "api_me": api(GET=P.VIEW),
    "api_integration_list": api(GET=P.VIEW),
    "api_integration_detail": api(
        PUT=P.JOB_WRITE, DELETE=P.JOB_WRITE, ids={"kind": "tracker_kind"}, data={"key": "0123456789"}
    ),
    "api_job_tensorboard": api(GET=P.VIEW, ids=JOB),
    "api_model_licence": api(
        GET=P.VIEW,
        POST=P.JOB_WRITE,
        ids={"model": "listed_model_name"},
        data={"licence": "Llama 3.1 Community License"},
    ),
    "api_model_file_list": api(GET=P.VIEW, ids={"model": "model_name"}),
    "api_model_file": api(GET=P.VIEW, ids={"model": "model_name", "name": "model_file"}),
    "api_model_limits": api(GET=P.VIEW, ids={"model": "model_name"}),
    "api_schema": public("documents the API; holds no data"),
    "api_unknown": public("says that there is nothing"),
    "api_unknown_v1": public("says that there is nothing"),
    "api_without_v1": public("says what the base URL lacks"),
    "api_estimates": api(POST=P.VIEW, data={"model": "anneal-demo"}, refs={"training_file": "dataset_version"}),
    "api_job_list": api(
        GET=P.VIEW, POST=P.JOB_WRITE, data={"model": "anneal-demo"}, refs={"training_file": "dataset_version"}
    ),
    "api_job_detail": api(GET=P.VIEW, ids=JOB),
    "api_job_cancel": api(POST=P.JOB_WRITE, ids=JOB),
    "api_job_pause": api(POST=P.JOB_WRITE, ids=JOB),
    "api_job_resume": api(POST=P.JOB_WRITE, ids=JOB),
    "api_job_moves": api(GET=P.VIEW, POST=P.JOB_WRITE, ids=JOB, data={"option": "local-cpu", "quoted_max_usd": "1"}),
    "api_job_retry": api(POST=P.JOB_WRITE, ids=JOB),
    "api_retraining_plan_list": api(
        GET=P.VIEW,
        POST=P.JOB_WRITE,
        data={"name": "weekly", "min_new_rows": 5, "max_usd": "1"},
        refs={"source_job": "job", "dataset": "dataset", "alias": "alias"},
    ),
    "api_retraining_plan_detail": api(
        GET=P.VIEW, POST=P.JOB_WRITE, DELETE=P.JOB_WRITE, ids=PLAN, data={"enabled": False}
    ),
    "api_retraining_list": api(GET=P.VIEW, POST=P.JOB_WRITE, ids=PLAN),
    "api_job_events": api(GET=P.VIEW, ids=JOB),
    "api_job_checkpoints": api(GET=P.VIEW, ids=JOB),
    "signed_object": signed(
        "the signature in the address; tests/integration/core/test_directory_store.py", "GET", "PUT"
    ),
    "api_file_list": api(GET=P.VIEW, POST=P.DATASET_WRITE),
    "api_file_detail": api(GET=P.VIEW, DELETE=P.DATASET_WRITE, ids=FILE),
    "api_file_columns": api(GET=P.VIEW, POST=P.DATASET_WRITE, ids=FILE, data={"mapping": {"format": "chat"}}),
    "api_file_repair": api(POST=P.DATASET_WRITE, ids=FILE, data={"mode": "drop"}),
    "api_file_edits": api(POST=P.DATASET_WRITE, ids=FILE, data={"line": 1, "row": '{"prompt": "a"}'}),
    "api_file_restore": api(POST=P.DATASET_WRITE, ids=FILE),
    "api_file_split": api(POST=P.DATASET_WRITE, ids=FILE, data={"share": 0.5}),
    "api_file_changes": api(GET=P.VIEW, POST=P.VIEW, ids=FILE, refs={"since": "dataset_version"}),
    "api_file_content": api(GET=P.VIEW, ids=FILE),
    "api_upload_list": api(
        POST=P.DATASET_WRITE,
        data={"bytes": 10, "filename": "a.jsonl", "mime_type": "text/plain", "purpose": "fine-tune"},
    ),
    "api_upload_parts": api(POST=P.DATASET_WRITE, ids=UPLOAD, data={"data": b"a file part"}),
    "api_upload_complete": api(POST=P.DATASET_WRITE, ids=UPLOAD, data={"part_ids": []}),
    "api_upload_cancel": api(POST=P.DATASET_WRITE, ids=UPLOAD),
    "api_batch_list": api(
        GET=P.VIEW,
        POST=P.INFERENCE,
        data={"endpoint": "/v1/chat/completions", "completion_window": "24h"},
        refs={"input_file_id": "batch_file"},
    ),
    "api_batch_detail": api(GET=P.VIEW, ids=BATCH),
    "api_batch_cancel": api(POST=P.INFERENCE, ids=BATCH),
    "api_completion_list": api(GET=P.VIEW),
    "api_completion_detail": api(
        GET=P.VIEW, POST=P.INFERENCE, DELETE=P.INFERENCE, ids=COMPLETION, data={"metadata": {"a": "b"}}
    ),
    "api_completion_messages": api(GET=P.VIEW, ids=COMPLETION),
    "api_eval_list": api(
        GET=P.VIEW,
        POST=P.INFERENCE,
        data={"data_source_config": {"type": "logs"}, "testing_criteria": [GRADING["grader"]]},
    ),
    "api_eval_detail": api(GET=P.VIEW, POST=P.INFERENCE, DELETE=P.INFERENCE, ids=EVAL, data={"name": "renamed"}),
    "api_eval_run_list": api(
        GET=P.VIEW,
        POST=P.INFERENCE,
        ids=EVAL,
        data={"data_source": {"type": "completions", "source": {"type": "stored_completions"}}},
    ),
    "api_eval_run_detail": api(GET=P.VIEW, DELETE=P.INFERENCE, ids=RUN),
    "api_eval_run_cancel": api(POST=P.INFERENCE, ids=RUN),
    "api_output_item_list": api(GET=P.VIEW, ids=RUN),
    "api_output_item_detail": api(GET=P.VIEW, ids=RUN | {"output_item_id": "output_item"}),
    "api_model_list": api(GET=P.VIEW),
    "api_model_detail": api(GET=P.VIEW, DELETE=P.ADAPTER_DELETE, ids={"model": "model_name"}),
    "api_model_serving": api(GET=P.VIEW, POST=P.ADAPTER_WRITE, ids={"model": "model_name"}),
    "api_model_conversions": api(
        GET=P.VIEW,
        POST=P.ADAPTER_WRITE,
        ids={"model": "model_name"},
        data={"kind": "merged_16bit", "quoted_max_usd": "1"},
    ),
    "api_model_conversion_cancel": api(
        POST=P.ADAPTER_WRITE, ids={"model": "model_name", "conversion_id": "conversion"}
    ),
    "api_model_pushes": api(
        GET=P.VIEW,
        POST=P.ADAPTER_WRITE,
        ids={"model": "model_name"},
        data={"repository": "acme/support", "token": "hf_a-token-of-the-hub"},
    ),
    "api_alias_list": api(
        GET=P.VIEW, POST=P.ADAPTER_WRITE, data={"name": "production"}, refs={"version": "model_name"}
    ),
    "api_alias_detail": api(GET=P.VIEW, DELETE=P.ADAPTER_WRITE, ids=ALIAS),
    "api_checkpoint_permissions": api(
        GET=P.VIEW, POST=P.ADAPTER_WRITE, ids={"model": "checkpoint_name"}, data={"project_ids": ["proj_1"]}
    ),
    "api_checkpoint_permission": api(
        DELETE=P.ADAPTER_WRITE, ids={"model": "checkpoint_name", "permission_id": "number"}
    ),
    "api_grader_validate": api(POST=P.VIEW, data=GRADING),
    "api_grader_run": api(POST=P.VIEW, data=GRADING | {"model_sample": "red"}),
    "api_checkpoint_serve": api(POST=P.ADAPTER_WRITE, ids={"checkpoint_id": "checkpoint"}),
    "api_alias_rollback": api(POST=P.ADAPTER_WRITE, ids=ALIAS),
    "api_billing": api(GET=P.VIEW),
    "api_billing_profile": api(GET=P.VIEW, POST=P.ORGANIZATION_MANAGE, data={"legal_name": "Acme GmbH"}),
    "api_invoice_list": api(GET=P.VIEW),
    "api_invoice_detail": api(GET=P.VIEW, ids=INVOICE),
    "api_invoice_lines": api(GET=P.VIEW, ids=INVOICE),
    "api_invoice_csv": api(GET=P.VIEW, ids=INVOICE),
    "api_invoice_pdf": api(GET=P.VIEW, ids=INVOICE),
    "api_ledger": api(GET=P.VIEW),
    "api_price_list": api(GET=P.VIEW),
    "api_costs": api(GET=P.VIEW),
    "api_credit_request_list": api(GET=P.VIEW, POST=P.JOB_WRITE, data={"amount_usd": "5"}),
    "api_credit_request_detail": api(GET=P.VIEW, ids={"request_id": "credit_request"}),
    "api_organization": api(GET=P.VIEW, POST=P.ORGANIZATION_MANAGE, data={"name": "Renamed"}),
    "api_dataset_list": api(
        GET=P.VIEW, POST=P.DATASET_WRITE, data={"name": "distilled", "stored_completions": {"model": "anneal-demo"}}
    ),
    "api_dataset_detail": api(GET=P.VIEW, DELETE=P.DATASET_WRITE, ids={"dataset_id": "dataset"}),
    "api_dataset_version_list": api(GET=P.VIEW, ids={"dataset_id": "dataset"}),
    "api_file_rows": api(GET=P.VIEW, ids=FILE),
    "api_file_findings": api(GET=P.VIEW, ids=FILE),
    "api_adapter_list": api(GET=P.VIEW, POST=P.ADAPTER_WRITE),
    "api_adapter_detail": api(GET=P.VIEW, DELETE=P.ADAPTER_DELETE, ids={"version_id": "adapter_version"}),
    "api_key_list": api(GET=P.VIEW, POST=P.KEY_MANAGE, data={"name": "nightly", "scopes": ["view"]}),
    "api_key_detail": api(
        GET=P.VIEW, POST=P.KEY_MANAGE, DELETE=P.KEY_MANAGE, ids={"key_id": "key"}, data={"name": "renamed"}
    ),
    "api_key_labels": api(PUT=P.ORGANIZATION_MANAGE, ids={"key_id": "key"}, data={"labels": {"team": "search"}}),
    "api_key_rotate": api(POST=P.KEY_MANAGE, ids={"key_id": "key"}),
    "api_member_list": api(GET=P.VIEW),
    "api_member_detail": api(
        GET=P.VIEW,
        POST=P.MEMBER_MANAGE,
        DELETE=P.MEMBER_MANAGE,
        ids={"membership_id": "membership"},
        data={"role": "viewer"},
    ),
    "api_invitation_list": api(GET=P.VIEW, POST=P.MEMBER_MANAGE, data={"email": "new@example.com", "role": "viewer"}),
    "api_invitation_detail": api(DELETE=P.MEMBER_MANAGE, ids={"invitation_id": "invitation"}),
    "api_project_list": api(GET=P.VIEW, POST=P.MEMBER_MANAGE, data={"name": "Search"}),
    "api_project_detail": api(GET=P.VIEW, POST=P.MEMBER_MANAGE, ids=PROJECT, data={"is_private": False}),
    "api_project_archive": api(POST=P.MEMBER_MANAGE, ids=PROJECT),
    "api_project_members": api(GET=P.VIEW, POST=P.MEMBER_MANAGE, ids=PROJECT, refs={"member": "membership"}),
    "api_project_member": api(DELETE=P.MEMBER_MANAGE, ids=PROJECT_MEMBER),
    "api_service_account_list": api(GET=P.VIEW, POST=P.MEMBER_MANAGE, data={"name": "ci", "role": "member"}),
    "api_service_account_detail": api(
        GET=P.VIEW,
        POST=P.MEMBER_MANAGE,
        DELETE=P.MEMBER_MANAGE,
        ids=SERVICE_ACCOUNT,
        data={"role": "viewer"},
    ),
    "api_service_account_keys": api(
        GET=P.VIEW, POST=P.KEY_MANAGE, ids=SERVICE_ACCOUNT, data={"name": "k", "scopes": ["view"]}
    ),
    "api_notification_list": api(GET=P.VIEW, POST=P.VIEW, refs={"notification": "notification"}),
    "api_budget_list": api(GET=P.VIEW, POST=P.ORGANIZATION_MANAGE, data={"limit_usd": "250"}),
    "api_budget_detail": api(GET=P.VIEW, DELETE=P.ORGANIZATION_MANAGE, ids={"budget_id": "budget"}),
    "api_allowance_list": api(
        GET=P.VIEW, POST=P.ORGANIZATION_MANAGE, data={"scope": "label", "target": "team=a", "queued_jobs": 1}
    ),
    "api_allowance_detail": api(GET=P.VIEW, DELETE=P.ORGANIZATION_MANAGE, ids={"allowance_id": "allowance"}),
    "api_quota_list": api(GET=P.VIEW),
    "api_usage": api(GET=P.VIEW),
}
