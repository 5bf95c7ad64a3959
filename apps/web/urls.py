"""Every page of the dashboard. Names follow apps/web/navigation.py: <noun>_<verb>, `_list` for an index."""

from django.urls import path

from apps.web import datasets, jobs, keys, members, organization, styleguide, theme, wizard

app_name = "web"

urlpatterns = [
    path("jobs", jobs.index, name="job_list"),
    path("jobs/new", wizard.new, name="job_new"),
    path("jobs/<str:job_id>", jobs.detail, name="job_detail"),
    path("jobs/<str:job_id>/chart", jobs.chart, name="job_chart"),
    path("jobs/<str:job_id>/stream", jobs.stream, name="job_stream"),
    path("jobs/<str:job_id>/cancel", jobs.cancel, name="job_cancel"),
    path("jobs/<str:job_id>/pause", jobs.pause, name="job_pause"),
    path("jobs/<str:job_id>/resume", jobs.resume, name="job_resume"),
    path("datasets", datasets.index, name="dataset_list"),
    path("datasets/upload", datasets.upload, name="dataset_upload"),
    path("datasets/<str:file_id>", datasets.detail, name="dataset_detail"),
    path("datasets/<str:file_id>/download", datasets.download, name="dataset_download"),
    path("datasets/<str:file_id>/delete", datasets.delete, name="dataset_delete"),
    path("theme", theme.switch, name="theme"),
    path("organization", organization.settings, name="organization_settings"),
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
