"""Every page of the dashboard.

Names follow apps/interfaces/web/shell/navigation.py: <noun>_<verb>, `_list` for an index.
"""

from django.urls import path

from apps.interfaces.web.account import audit, keys, licences, members, organization, profile, trackers
from apps.interfaces.web.adapters import serving, views
from apps.interfaces.web.billing import budgets, charges, credit, invoices, payment_settings, stripe_webhook, usage
from apps.interfaces.web.datasets import columns, detail, uploads
from apps.interfaces.web.datasets import views as datasets
from apps.interfaces.web.help import views as help_views
from apps.interfaces.web.jobs import accuracy, comparison, job_list, tabs, tensorboard
from apps.interfaces.web.jobs import views as jobs
from apps.interfaces.web.playground import rows, saved
from apps.interfaces.web.playground import views as playground
from apps.interfaces.web.shell import first_job, overview, search, styleguide, theme
from apps.interfaces.web.wizard import views as wizard

app_name = "web"

urlpatterns = [
    path("", overview.index, name="overview"),
    path("first-job", first_job.train, name="first_job"),
    path("credit", credit.index, name="credit"),
    path("help", help_views.index, name="help"),
    path("help/quickstart", help_views.quickstart, name="help_quickstart"),
    path("help/reference", help_views.reference, name="help_reference"),
    path("help/<str:slug>", help_views.page, name="help_page"),
    path("invoices", invoices.show, name="invoice_list"),
    path("invoices/<str:invoice_id>", invoices.invoice, name="invoice_detail"),
    path("invoices/<str:invoice_id>/csv", invoices.invoice_csv, name="invoice_csv"),
    path("invoices/<str:invoice_id>/pdf", invoices.invoice_pdf, name="invoice_pdf"),
    path("prices", invoices.prices, name="price_list"),
    path("budgets", budgets.index, name="budget_list"),
    path("budgets/<str:budget_id>/end", budgets.end, name="budget_end"),
    path("budgets/key-labels", budgets.label_key, name="budget_key_labels"),
    path("why/<str:reference>", charges.show, name="charge_why"),
    path("jobs", job_list.index, name="job_list"),
    path("jobs/new", wizard.new, name="job_new"),
    path("jobs/new/prepare", wizard.prepare, name="job_prepare"),
    path("jobs/compare", comparison.show, name="job_compare"),
    path("jobs/export", job_list.export, name="job_export"),
    path("jobs/<str:job_id>", jobs.detail, name="job_detail"),
    path("jobs/<str:job_id>/chart", jobs.chart, name="job_chart"),
    path("jobs/<str:job_id>/log", tabs.download_log, name="job_log"),
    path("jobs/<str:job_id>/tensorboard", tensorboard.download, name="job_tensorboard"),
    path("jobs/<str:job_id>/stream", jobs.stream, name="job_stream"),
    path("jobs/<str:job_id>/cancel", jobs.cancel, name="job_cancel"),
    path("checkpoints/<str:checkpoint_id>/try", serving.try_checkpoint, name="checkpoint_try"),
    path("jobs/<str:job_id>/pause", jobs.pause, name="job_pause"),
    path("jobs/<str:job_id>/resume", jobs.resume, name="job_resume"),
    path("jobs/<str:job_id>/retry", jobs.retry, name="job_retry"),
    path("datasets", datasets.index, name="dataset_list"),
    path("datasets/upload", datasets.upload, name="dataset_upload"),
    path("datasets/uploads", uploads.create, name="dataset_upload_create"),
    path("datasets/uploads/<str:upload_id>", uploads.state, name="dataset_upload_state"),
    path("datasets/uploads/<str:upload_id>/sign", uploads.sign, name="dataset_upload_sign"),
    path("datasets/uploads/<str:upload_id>/complete", uploads.complete, name="dataset_upload_complete"),
    path("datasets/uploads/<str:upload_id>/cancel", uploads.cancel, name="dataset_upload_cancel"),
    path("datasets/<str:file_id>", detail.detail, name="dataset_detail"),
    path("datasets/<str:file_id>/download", datasets.download, name="dataset_download"),
    path("datasets/<str:file_id>/columns", columns.columns, name="dataset_columns"),
    path("datasets/<str:file_id>/repair", columns.repair, name="dataset_repair"),
    path("datasets/<str:file_id>/dismiss", columns.dismiss, name="dataset_dismiss"),
    path("datasets/<str:file_id>/delete", datasets.delete, name="dataset_delete"),
    path("adapters", views.index, name="adapter_list"),
    path("adapters/<str:version_id>", views.detail, name="adapter_detail"),
    path("adapters/<str:version_id>/download", views.download, name="adapter_download"),
    path("adapters/<str:version_id>/deploy", views.deploy, name="adapter_deploy"),
    path("adapters/<str:version_id>/undeploy", views.undeploy, name="adapter_undeploy"),
    path("adapters/<str:version_id>/delete", views.delete, name="adapter_delete"),
    path("adapters/<str:version_id>/alias", serving.point_alias, name="alias_point"),
    path("adapters/<str:version_id>/warm", serving.keep_warm, name="adapter_warm"),
    path("aliases/<str:alias_id>/rollback", serving.roll_back_alias, name="alias_rollback"),
    path("aliases/<str:alias_id>/delete", serving.delete_alias, name="alias_delete"),
    path("playground", playground.show, name="playground"),
    path("playground/token", playground.token, name="playground_token"),
    path("playground/prompt", rows.render_prompt, name="playground_prompt"),
    path("playground/code", rows.copy_as, name="playground_code"),
    path("playground/rows", rows.save_row, name="playground_save"),
    path("playground/saved", saved.index, name="playground_saved"),
    path("playground/saved/delete", saved.delete, name="playground_delete"),
    path("playground/conversations", saved.keep, name="playground_keep"),
    path("playground/presets", saved.create_preset, name="playground_preset"),
    path("playground/presets/<str:preset_id>/delete", saved.remove_preset, name="playground_preset_delete"),
    path("billing", payment_settings.index, name="billing"),
    path("billing/topups", payment_settings.top_up, name="billing_topup"),
    path("billing/card", payment_settings.leave_card, name="billing_card"),
    path("billing/portal", payment_settings.open_portal, name="billing_portal"),
    path("billing/auto-recharge", payment_settings.auto_recharge, name="billing_recharge"),
    path("billing/pages/<str:page_id>", payment_settings.page, name="billing_page"),
    path("billing/pages/<str:page_id>/ask", payment_settings.ask, name="billing_page_ask"),
    path("stripe/webhook", stripe_webhook.receive, name="stripe_webhook"),
    path("usage", usage.show, name="usage"),
    path("usage/export", usage.export, name="usage_export"),
    path("search", search.show, name="search"),
    path("accuracy", accuracy.show, name="accuracy"),
    path("theme", theme.switch, name="theme"),
    path("account", profile.show, name="account"),
    path("licences/accept", licences.accept, name="licence_accept"),
    path("organization/trackers", trackers.index, name="tracker_list"),
    path("organization/trackers/<str:kind>/remove", trackers.remove, name="tracker_remove"),
    path("organization", organization.settings, name="organization_settings"),
    path("organization/audit", audit.index, name="audit"),
    path("organization/audit/export", audit.download, name="audit_download"),
    path("organization/second-factor", organization.second_factor, name="organization_second_factor"),
    path("organization/new", organization.create, name="organization_create"),
    path("organization/switch", organization.switch, name="organization_switch"),
    path("members", members.index, name="member_list"),
    path("members/invite", members.invite, name="member_invite"),
    path("members/<str:membership_id>/role", members.change_role, name="member_role"),
    path("members/<str:membership_id>/remove", members.remove, name="member_remove"),
    path("invitations/<str:invitation_id>/revoke", members.revoke_invitation, name="invitation_revoke"),
    path("invitations/accept/<str:token>", members.accept_invitation, name="invitation_accept"),
    path("keys", keys.index, name="key_list"),
    path("keys/<str:key_id>/revoke", keys.revoke, name="key_revoke"),
    path("styleguide", styleguide.show, name="styleguide"),
    path("styleguide/metrics", styleguide.metrics, name="styleguide_metrics"),
]
