"""The public API: OpenAI's surface under /v1, ours under /api/v1. No trailing slash: a redirect loses a POST's body."""

from django.urls import path
from drf_spectacular.views import SpectacularJSONAPIView

from apps.api import me

urlpatterns = [
    path("api/v1/me", me.MeView.as_view(), name="api_me"),
    path("api/v1/schema", SpectacularJSONAPIView.as_view(), name="api_schema"),
]
