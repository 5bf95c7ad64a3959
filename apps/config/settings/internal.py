"""The worker API: a private listener, a narrower database role, no sessions and no templates."""

from apps.config.settings.base import *  # noqa: F403
from apps.config.settings.base import INSTALLED_APPS

# Nobody signs in here, and allauth insists on its middleware wherever it is installed.
INSTALLED_APPS = [app for app in INSTALLED_APPS if not app.startswith("allauth")]
ROOT_URLCONF = "apps.config.urls_internal"
ALLOWED_HOSTS = ["*"]  # a private listener; workers reach it under whatever name the network gives it
MIDDLEWARE = [
    "apps.core.http.asgi.RequestIdMiddleware",
    "apps.core.http.origin.OriginMiddleware",
    "django.middleware.common.CommonMiddleware",
    "apps.core.http.asgi.RefuseNulMiddleware",
]
