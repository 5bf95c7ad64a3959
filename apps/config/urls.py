"""Every public URL."""

from django.urls import include, path

urlpatterns = [
    path("accounts/", include("apps.accounts.urls")),
    path("", include("apps.api.urls")),
    path("staff/", include("apps.staff.urls", namespace="staff")),
    path("objects/", include("apps.core.urls")),
    path("", include("apps.web.urls", namespace="web")),
]

handler400 = "apps.core.http.bad_request"
handler403 = "apps.core.http.permission_denied"
handler404 = "apps.core.http.not_found"
handler500 = "apps.core.http.server_error"
