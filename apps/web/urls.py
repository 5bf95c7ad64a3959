"""Every page of the dashboard. Names follow apps/web/navigation.py: <noun>_<verb>, `_list` for an index."""

from django.urls import path

from apps.web import keys, members, organization, styleguide, theme

app_name = "web"

urlpatterns = [
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
