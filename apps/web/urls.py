"""Every page of the dashboard. Names follow apps/web/navigation.py: <noun>_<verb>, `_list` for an index."""

from django.urls import path

from apps.web import theme

app_name = "web"

urlpatterns = [
    path("theme", theme.switch, name="theme"),
]
