"""One line per address: who may use it, and what to try on it. A URL without a line, or a line without a URL, fails.

    page(get=P, post=P)   a page of an organization; the permission each method asks of the member's role
    person(get, post)     a page for anybody signed in
    api(GET=P, POST=P)    an endpoint for keys; the scope each method asks
    staff(get, post)      a page for operators
    public(reason)        open to everybody; says why
    signed(reason)        opened by something else than a session or a key; says what, and where that is tested

`ids` names the object each part of the address stands for (kinds in world.py), `data` is what a POST sends, `refs` the
members of it (or of the query) that name an object of the tenant: they too are tried with another tenant's ids.
`refuses` names roles that hold the permission and are refused all the same, each with the operation's rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from apps.accounts.roles import Permission as P  # noqa: N817 - one line per address

Kind = Literal["page", "person", "api", "staff", "public", "signed"]


@dataclass(frozen=True)
class Url:
    kind: Kind
    methods: Mapping[str, P | None] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    refs: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""


def page(*, get: P | None = None, post: P | None = None, **what: Any) -> Url:
    methods = {method: asked for method, asked in (("GET", get), ("POST", post)) if asked is not None}
    return Url("page", methods, **what)


def person(*methods: str, **what: Any) -> Url:
    return Url("person", dict.fromkeys(methods), **what)


def staff(*methods: str, **what: Any) -> Url:
    return Url("staff", dict.fromkeys(methods), **what)


def api(
    ids: Mapping[str, str] | None = None,
    data: Mapping[str, Any] | None = None,
    refs: Mapping[str, str] | None = None,
    **methods: P,
) -> Url:
    return Url("api", methods, ids=ids or {}, data=data or {}, refs=refs or {})


def public(reason: str, *methods: str, **what: Any) -> Url:
    return Url("public", dict.fromkeys(methods or ("GET",)), reason=reason, **what)


def signed(reason: str, *methods: str, **what: Any) -> Url:
    return Url("signed", dict.fromkeys(methods or ("GET",)), reason=reason, **what)


JOB = {"job_id": "job"}
ADAPTER = {"version_id": "adapter_version"}
ALIAS = {"alias_id": "alias"}
FILE = {"file_id": "dataset_version"}
UPLOAD = {"upload_id": "upload"}
BATCH = {"batch_id": "batch"}
GRADING = {"grader": {"type": "string_check", "name": "a", "input": "red", "reference": "red", "operation": "eq"}}
WEBHOOK = {"webhook_id": "webhook"}
SERVICE_ACCOUNT = {"service_account_id": "service_account"}
NEW_WEBHOOK = {"url": "https://hooks.example.com/a", "event_types": ["batch.completed"]}

URLS: dict[str, Url] = {
    # allauth
    "account_login": public("the way in", "GET", "POST"),
    "account_logout": public("harmless without a session", "GET", "POST"),
    "account_signup": public("the way in", "GET", "POST"),
    "account_inactive": public("tells a closed account that it is"),
    "account_email_verification_sent": public("says that a mail was sent"),
    "account_confirm_email": public(
        "the link in the mail is the credential", "GET", "POST", ids={"key": "invitation_token"}
    ),
    "account_change_password": person("GET", "POST"),
    "account_reset_password": public("answers the same for known and unknown addresses", "GET", "POST"),
    "account_reset_password_done": public("says that a mail was sent"),
    "account_reset_password_from_key": public(
        "the link in the mail is the credential",
        "GET",
        "POST",
        ids={"uidb36": "invitation_token", "key": "invitation_token"},
    ),
    "account_reset_password_from_key_done": public("says that a password was changed"),
    "account_reauthenticate": person("GET", "POST"),
    "mfa_index": person("GET"),
    "mfa_authenticate": public("the second step of the way in; without the first it leads there", "GET", "POST"),
    "mfa_reauthenticate": person("GET", "POST"),
    "mfa_activate_totp": person("GET", "POST"),
    "mfa_deactivate_totp": person("GET", "POST"),
    "mfa_view_recovery_codes": person("GET"),
    "mfa_generate_recovery_codes": person("GET", "POST"),
    "mfa_add_webauthn": person("GET", "POST"),
    "mfa_reauthenticate_webauthn": person("GET", "POST"),
    "mfa_remove_webauthn": person("GET", "POST", ids={"pk": "number"}),
    # members, keys, organizations
    "web:member_list": page(get=P.VIEW),
    "web:member_invite": page(post=P.MEMBER_MANAGE, data={"email": "new@example.com", "role": "viewer"}),
    "web:member_role": page(post=P.MEMBER_MANAGE, ids={"membership_id": "membership"}, data={"role": "member"}),
    "web:member_remove": page(get=P.VIEW, post=P.VIEW, refs={"member": "membership"}),
    "web:member_export": page(get=P.VIEW),
    "web:service_account_list": page(get=P.VIEW, post=P.MEMBER_MANAGE, data={"name": "ci", "role": "viewer"}),
    "web:service_account_role": page(post=P.MEMBER_MANAGE, ids=SERVICE_ACCOUNT, data={"role": "member"}),
    "web:service_account_remove": page(get=P.MEMBER_MANAGE, post=P.MEMBER_MANAGE, refs={"account": "service_account"}),
    "web:invitation_revoke": page(post=P.MEMBER_MANAGE, ids={"invitation_id": "invitation"}),
    "web:invitation_accept": public("the link is the credential", "GET", "POST", ids={"token": "invitation_token"}),
    "web:key_list": page(get=P.VIEW, post=P.KEY_MANAGE, data={"name": "k", "scopes": ["view"], "expires": "30"}),
    "web:key_revoke": page(get=P.KEY_MANAGE, post=P.KEY_MANAGE, refs={"key": "key"}),
    "web:key_export": page(get=P.VIEW),
    "web:view_save": page(post=P.VIEW, data={"listing": "web:job_list", "name": "Failed", "query": "status=failed"}),
    "web:view_delete": page(
        post=P.VIEW,
        ids={"view_id": "saved_view"},
        refuses=dict.fromkeys(("viewer", "member", "admin"), "members delete their own views, this is the owner's"),
    ),
    "web:licence_accept": page(
        post=P.JOB_WRITE,
        data={"model": "llama-3.1-8b", "licence": "Llama 3.1 Community License", "next": "/jobs/new"},
    ),
    "web:tracker_list": page(get=P.VIEW, post=P.JOB_WRITE, data={"kind": "wandb", "key": "0123456789"}),
    "web:tracker_remove": page(post=P.JOB_WRITE, ids={"kind": "tracker_kind"}),
    "web:webhook_list": page(
        get=P.WEBHOOK_MANAGE,
        post=P.WEBHOOK_MANAGE,
        data=NEW_WEBHOOK | {"format": "standard"},
    ),
    "web:webhook_delete": page(get=P.WEBHOOK_MANAGE, post=P.WEBHOOK_MANAGE, refs={"webhook": "webhook"}),
    "web:webhook_detail": page(
        get=P.WEBHOOK_MANAGE,
        post=P.WEBHOOK_MANAGE,
        ids=WEBHOOK,
        data=NEW_WEBHOOK | {"format": "slack"},
    ),
    "web:webhook_pause": page(post=P.WEBHOOK_MANAGE, ids=WEBHOOK),
    "web:webhook_rotate": page(post=P.WEBHOOK_MANAGE, ids=WEBHOOK),
    "web:webhook_test": page(post=P.WEBHOOK_MANAGE, ids=WEBHOOK),
    "web:webhook_replay": page(post=P.WEBHOOK_MANAGE, ids=WEBHOOK | {"delivery_id": "webhook_delivery"}),
    "web:organization_settings": page(get=P.VIEW, post=P.ORGANIZATION_MANAGE, data={"name": "New"}),
    "web:audit": page(get=P.AUDIT_READ),
    "web:audit_download": page(get=P.AUDIT_READ),
    "web:organization_second_factor": page(post=P.ORGANIZATION_MANAGE),
    "web:organization_create": person("GET", "POST", data={"name": "Another"}),
    "web:organization_switch": person("POST", refs={"organization": "organization"}),
    "web:accuracy": public("figures over several organizations' runs, above a floor; tests/web/jobs/test_accuracy.py"),
    "web:search": page(get=P.VIEW),
    "web:brand_logo": public("the operator's logo; tests/web/shell/test_branding.py"),
    "web:brand_style": public("the operator's colour; tests/web/shell/test_branding.py"),
    "web:theme": public("a cookie of the reader's own", "POST", data={"theme": "dark"}),
    # datasets and jobs
    "web:dataset_list": page(get=P.VIEW),
    "web:dataset_export": page(get=P.VIEW),
    "web:dataset_delete_many": page(get=P.DATASET_WRITE, post=P.DATASET_WRITE, refs={"dataset": "dataset"}),
    "web:dataset_upload": page(get=P.DATASET_WRITE, post=P.DATASET_WRITE),
    "web:dataset_detail": page(get=P.VIEW, post=P.VIEW, ids=FILE),
    "web:dataset_download": page(get=P.VIEW, ids=FILE),
    "web:dataset_upload_create": page(post=P.DATASET_WRITE),
    "web:dataset_upload_state": page(get=P.DATASET_WRITE, ids=UPLOAD),
    "web:dataset_upload_sign": page(post=P.DATASET_WRITE, ids=UPLOAD),
    "web:dataset_upload_complete": page(post=P.DATASET_WRITE, ids=UPLOAD),
    "web:dataset_upload_cancel": page(post=P.DATASET_WRITE, ids=UPLOAD),
    "web:dataset_columns": page(get=P.DATASET_WRITE, post=P.DATASET_WRITE, ids=FILE),
    "web:dataset_repair": page(get=P.DATASET_WRITE, post=P.DATASET_WRITE, ids=FILE),
    "web:dataset_row": page(get=P.DATASET_WRITE, post=P.DATASET_WRITE, ids=FILE),
    "web:dataset_changes": page(get=P.VIEW, post=P.VIEW, ids=FILE),
    "web:dataset_restore": page(post=P.DATASET_WRITE, ids=FILE),
    "web:dataset_split": page(post=P.DATASET_WRITE, ids=FILE, data={"share": "20", "seed": "42"}),
    "web:dataset_dismiss": page(post=P.DATASET_WRITE, ids=FILE),
    "web:dataset_delete": page(get=P.DATASET_WRITE, post=P.DATASET_WRITE, ids=FILE),
    "web:job_list": page(get=P.VIEW),
    "web:job_detail": page(get=P.VIEW, ids=JOB),
    "web:job_cancel_many": page(get=P.JOB_WRITE, post=P.JOB_WRITE, refs={"job": "job"}),
    "web:job_chart": page(get=P.VIEW, ids=JOB),
    "web:job_log": page(get=P.VIEW, ids=JOB),
    "web:job_tensorboard": page(get=P.VIEW, ids=JOB),
    "web:job_stream": page(get=P.VIEW, ids=JOB),
    "web:job_cancel": page(post=P.JOB_WRITE, ids=JOB),
    "web:checkpoint_try": page(post=P.ADAPTER_WRITE, ids={"checkpoint_id": "checkpoint"}),
    "web:job_pause": page(post=P.JOB_WRITE, ids=JOB),
    "web:job_resume": page(post=P.JOB_WRITE, ids=JOB),
    "web:job_retry": page(post=P.JOB_WRITE, ids=JOB),
    "web:job_dismiss": page(post=P.JOB_WRITE, ids=JOB),
    # overview, the wizard, adapters, playground, usage
    "web:overview": page(get=P.VIEW),
    "web:job_compare": page(get=P.VIEW, data={"job": "job"}, refs={"job": "job"}),
    "web:job_export": page(get=P.VIEW),
    "web:first_job": page(post=P.JOB_WRITE, data={"once": "x", "cap_nano": "10000000"}),
    "web:account": person("GET", "POST", data={"name": "Nora"}),
    "web:session_list": person("GET", "POST"),
    "web:notification_list": page(get=P.VIEW),
    "web:notification_read": page(post=P.VIEW, refs={"notification": "notification"}),
    "web:help": public("the repository's pages"),
    "web:help_page": public("the repository's pages", ids={"slug": "help_slug"}),
    "web:help_reference": public("the API's own document is public"),
    "web:help_quickstart": page(get=P.VIEW),
    "web:credit": page(get=P.VIEW, post=P.JOB_WRITE, data={"amount_usd": "5"}),
    "web:job_prepare": page(post=P.JOB_WRITE),  # the ids in its query: tests/web/jobs/test_wizard.py
    "web:job_rehearse": page(post=P.JOB_WRITE),
    "web:job_new": page(
        get=P.JOB_WRITE,
        post=P.JOB_WRITE,
        data={"model": "anneal-demo", "method": "lora", "pool": "local-cpu", "cap_nano": "1000000000"},
        refs={"dataset": "dataset_version"},
    ),
    "web:adapter_list": page(get=P.VIEW),
    "web:adapter_upload": page(get=P.ADAPTER_WRITE, post=P.ADAPTER_WRITE, data={"name": "mine"}),
    "web:adapter_detail": page(get=P.VIEW, ids=ADAPTER),
    "web:adapter_download": page(get=P.VIEW, ids=ADAPTER),
    "web:adapter_deploy": page(post=P.ADAPTER_WRITE, ids=ADAPTER),
    "web:adapter_stop": page(get=P.ADAPTER_WRITE, post=P.ADAPTER_WRITE, refs={"version": "adapter_version"}),
    "web:adapter_export": page(get=P.VIEW),
    "web:alias_point": page(post=P.ADAPTER_WRITE, ids=ADAPTER, data={"name": "production"}),
    "web:alias_rollback": page(post=P.ADAPTER_WRITE, ids=ALIAS),
    "web:alias_delete": page(get=P.ADAPTER_WRITE, post=P.ADAPTER_WRITE, refs={"alias": "alias"}),
    "web:adapter_warm": page(post=P.ADAPTER_WRITE, ids=ADAPTER),
    "web:adapter_delete": page(get=P.ADAPTER_DELETE, post=P.ADAPTER_DELETE, ids=ADAPTER),
    "web:playground": page(get=P.VIEW),
    "web:playground_token": page(post=P.INFERENCE),
    "web:playground_prompt": page(post=P.VIEW),
    "web:playground_code": page(post=P.VIEW),
    "web:playground_save": page(post=P.DATASET_WRITE),
    "web:playground_saved": page(get=P.VIEW),
    "web:playground_keep": page(post=P.INFERENCE),
    "web:playground_delete": page(post=P.VIEW),
    "web:playground_preset": page(post=P.INFERENCE, data={"name": "k", "settings": "{}"}),
    "web:playground_preset_delete": page(
        post=P.INFERENCE, ids={"preset_id": "preset"}, refuses={"member": "members delete their own presets"}
    ),
    "web:batch_list": page(get=P.VIEW),
    "web:batch_export": page(get=P.VIEW),
    "web:batch_cancel": page(get=P.INFERENCE, post=P.INFERENCE, refs={"batch": "batch"}),
    "web:batch_download": page(get=P.VIEW, ids={"file_id": "batch_file"}),
    "web:batch_detail": page(get=P.VIEW, ids=BATCH),
    "web:billing": page(get=P.VIEW),
    "web:billing_topup": page(post=P.ORGANIZATION_MANAGE, data={"amount_usd": "50"}),
    "web:billing_card": page(post=P.ORGANIZATION_MANAGE),
    "web:billing_portal": page(post=P.ORGANIZATION_MANAGE),
    "web:billing_recharge": page(
        post=P.ORGANIZATION_MANAGE, data={"threshold_usd": "10", "amount_usd": "50", "monthly_cap_usd": "200"}
    ),
    "web:billing_page": page(get=P.ORGANIZATION_MANAGE, ids={"page_id": "hosted_page"}),
    "web:billing_page_ask": page(post=P.ORGANIZATION_MANAGE, ids={"page_id": "hosted_page"}),
    "web:stripe_webhook": public("Stripe's signature is the credential; tests/web/money/test_billing.py", "POST"),
    "web:usage": page(get=P.VIEW),
    "web:invoice_list": page(get=P.VIEW, post=P.ORGANIZATION_MANAGE, data={"chargeback_label": "team"}),
    "web:price_list": page(get=P.VIEW),
    "web:budget_list": page(
        get=P.VIEW,
        post=P.ORGANIZATION_MANAGE,
        data={"scope": "organization", "limit_usd": "10", "mode": "block", "thresholds": "50"},
    ),
    "web:budget_end": page(get=P.ORGANIZATION_MANAGE, post=P.ORGANIZATION_MANAGE, refs={"budget": "budget"}),
    "web:budget_key_labels": page(post=P.ORGANIZATION_MANAGE, data={"labels": "team=a"}, refs={"key": "key"}),
    "web:invoice_detail": page(get=P.VIEW, ids={"invoice_id": "invoice"}),
    "web:invoice_csv": page(get=P.VIEW, ids={"invoice_id": "invoice"}),
    "web:invoice_pdf": page(get=P.VIEW, ids={"invoice_id": "invoice"}),
    "web:charge_why": page(get=P.VIEW, ids={"reference": "invoice_line"}),
    "web:usage_export": page(get=P.VIEW),
    "web:usage_traffic": page(get=P.VIEW),
    "web:usage_traffic_export": page(get=P.VIEW),
    # the public API
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
    "api_job_retry": api(POST=P.JOB_WRITE, ids=JOB),
    "api_job_events": api(GET=P.VIEW, ids=JOB),
    "api_job_checkpoints": api(GET=P.VIEW, ids=JOB),
    "web:styleguide": person("GET"),
    "web:styleguide_metrics": person("GET"),
    "signed_object": signed("the signature in the address; tests/integration/core/test_object_store.py", "GET", "PUT"),
    "api_file_list": api(GET=P.VIEW, POST=P.DATASET_WRITE),
    "api_file_detail": api(GET=P.VIEW, DELETE=P.DATASET_WRITE, ids=FILE),
    "api_file_columns": api(GET=P.VIEW, POST=P.DATASET_WRITE, ids=FILE, data={"mapping": {"format": "chat"}}),
    "api_file_repair": api(POST=P.DATASET_WRITE, ids=FILE, data={"mode": "drop"}),
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
    "api_model_list": api(GET=P.VIEW),
    "api_model_detail": api(GET=P.VIEW, DELETE=P.ADAPTER_DELETE, ids={"model": "model_name"}),
    "api_model_serving": api(GET=P.VIEW, POST=P.ADAPTER_WRITE, ids={"model": "model_name"}),
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
    "api_dataset_list": api(GET=P.VIEW),
    "api_dataset_detail": api(GET=P.VIEW, DELETE=P.DATASET_WRITE, ids={"dataset_id": "dataset"}),
    "api_dataset_version_list": api(GET=P.VIEW, ids={"dataset_id": "dataset"}),
    "api_file_rows": api(GET=P.VIEW, ids=FILE),
    "api_file_findings": api(GET=P.VIEW, ids=FILE),
    "api_adapter_list": api(GET=P.VIEW, POST=P.ADAPTER_WRITE),
    "api_adapter_detail": api(GET=P.VIEW, DELETE=P.ADAPTER_DELETE, ids={"version_id": "adapter_version"}),
    "api_key_list": api(GET=P.VIEW, POST=P.KEY_MANAGE, data={"name": "nightly", "scopes": ["view"]}),
    "api_key_detail": api(GET=P.VIEW, DELETE=P.KEY_MANAGE, ids={"key_id": "key"}),
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
    "api_quota_list": api(GET=P.VIEW),
    "api_usage": api(GET=P.VIEW),
    # the operator console
    "staff:organization_suspend": staff("POST", ids={"organization_id": "organization"}, data={"reason": "abuse"}),
    "staff:organization_reinstate": staff("POST", ids={"organization_id": "organization"}, data={"reason": "paid"}),
    "staff:audit": staff("GET"),
    "staff:pool_list": staff("GET", "POST"),
    "staff:pool_detail": staff("GET", "POST", ids={"pool_id": "pool"}),
    "staff:pool_capacity": staff("POST", ids={"pool_id": "pool"}, data={"kind": "static"}),
    "staff:pool_token": staff("POST", ids={"pool_id": "pool"}, data={"kind": "trainer"}),
    "staff:pool_calibrations": staff("GET", ids={"pool_id": "pool"}),
    "staff:calibration_use": staff("POST", ids={"pool_id": "pool"}, data={"number": ""}),
    "staff:calibration_follow": staff("POST", ids={"pool_id": "pool"}),
    "staff:worker_detail": staff("GET", ids={"worker_id": "worker"}),
    "staff:worker_cordon": staff("POST", ids={"worker_id": "worker"}),
    "staff:worker_uncordon": staff("POST", ids={"worker_id": "worker"}),
    "staff:worker_drain": staff("POST", ids={"worker_id": "worker"}),
    "staff:worker_revoke": staff("POST", ids={"worker_id": "worker"}),
    "staff:replica_list": staff("GET"),
    "staff:replica_detail": staff("GET", "POST", ids={"replica_id": "replica"}),
    "staff:replica_drain": staff("POST", ids={"replica_id": "replica"}),
    "staff:replica_accept": staff("POST", ids={"replica_id": "replica"}),
    "staff:replica_accept_room": staff(
        "POST", ids={"replica_id": "replica"}, data={"capacity": "56", "slots": "8", "max_rank": "64"}
    ),
    "staff:replica_clear": staff("POST", ids={"replica_id": "replica"}),
    "staff:base_model_list": staff("GET", "POST"),
    "staff:base_model_look_up": staff("POST", data={"repo": "acme/tiny"}),
    "staff:hub_lookup": staff("GET", "POST", ids={"lookup_id": "hub_lookup"}, data={"name": "looked-up"}),
    "staff:base_model_install": staff("POST", ids={"base_model_id": "base_model"}),
    "staff:base_model_retire": staff("POST", ids={"base_model_id": "base_model"}),
    "staff:home": staff("GET"),
    "staff:organization_detail": staff("GET", ids={"organization_id": "organization"}),
    "staff:organization_view": staff("POST", ids={"organization_id": "organization"}),
    "staff:viewing_stop": staff("POST"),
    "staff:job_detail": staff("GET", ids={"job_id": "job"}),
    "staff:job_cancel": staff("POST", ids={"job_id": "job"}),
    "staff:job_continue": staff("POST", ids={"job_id": "job"}),
    "staff:books": staff("GET"),
    "staff:adjustment_create": staff(
        "GET",
        "POST",
        ids={"organization_id": "organization"},
        data={"amount_usd": "1", "reason": "goodwill", "once": f"adj_{'0' * 26}"},
    ),
    "staff:credit_request_decline": staff("POST", ids={"request_id": "credit_request"}, data={"reason": "x"}),
    "staff:adjustment_decide": staff("POST", ids={"adjustment_id": "adjustment"}, data={"decision": "reject"}),
    "staff:margin": staff("GET", "POST"),
    "staff:price_list": staff("GET", "POST"),
    "staff:price_decide": staff("POST", ids={"request_id": "price_request"}, data={"decision": "reject"}),
    "staff:payment_list": staff("GET"),
    "staff:payment_refund": staff("GET", "POST", ids={"topup_id": "topup"}, data={"amount_usd": "1", "reason": "r"}),
    "staff:refund_decide": staff("POST", ids={"refund_id": "card_refund"}, data={"decision": "reject"}),
    "staff:difference_resolve": staff("POST", ids={"difference_id": "difference"}, data={"note": "looked"}),
    "staff:quota_list": staff("GET"),
    "staff:quota_edit": staff("GET", "POST", ids={"organization_id": "organization"}),
    "staff:job_list": staff("GET"),
    "staff:search": staff("GET"),
    "staff:organization_list": staff("GET"),
}
