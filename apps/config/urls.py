"""Every public URL."""

from django.urls import include, path

urlpatterns = [
    path("accounts/", include("apps.accounts.urls")),
    path("", include("apps.interfaces.api.urls")),
    path("staff/", include("apps.interfaces.staff.urls", namespace="staff")),
    path("objects/", include("apps.core.objects.urls")),
    path("", include("apps.interfaces.web.urls", namespace="web")),
]

handler400 = "apps.core.http.asgi.bad_request"
handler403 = "apps.core.http.asgi.permission_denied"
handler404 = "apps.core.http.asgi.not_found"
handler429 = "apps.core.http.asgi.too_many_requests"  # a name of allauth, not of Django
handler500 = "apps.core.http.statement_limits.server_error"
