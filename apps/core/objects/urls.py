"""Signed objects, mounted under /objects/ of the web process and of the internal process."""

from django.urls import path

from apps.core.objects.views import signed_object

urlpatterns = [path("<path:key>", signed_object, name="signed_object")]
