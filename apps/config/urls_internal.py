"""URLs of the private listener."""

from django.urls import include, path

urlpatterns = [
    path("internal/v1/", include("apps.interfaces.worker_api.urls")),
    path("objects/", include("apps.core.objects.urls")),
]

handler500 = "apps.core.http.statement_limits.server_error"
