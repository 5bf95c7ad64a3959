"""Every public URL."""

from django.urls import include, path

urlpatterns = [
    path("accounts/", include("allauth.account.urls")),
    path("", include("apps.api.urls")),
    path("staff/", include("apps.staff.urls", namespace="staff")),
    path("objects/", include("apps.core.urls")),
    path("", include("apps.web.urls", namespace="web")),
]
