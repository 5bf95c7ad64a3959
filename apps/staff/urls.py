"""URLs of the operator console; every view is an `operator_view`."""

from django.urls import URLPattern

app_name = "staff"

urlpatterns: list[URLPattern] = []
