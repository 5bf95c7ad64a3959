"""Settings of the worker API: a private listener, a narrower database role, no sessions and no templates."""

from apps.config.settings.base import *  # noqa: F403
from apps.config.settings.base import INSTALLED_APPS

# No person signs in here, and allauth requires its middleware wherever it is installed.
INSTALLED_APPS = [app for app in INSTALLED_APPS if not app.startswith("allauth")]
ROOT_URLCONF = "apps.config.urls_internal"
ALLOWED_HOSTS = ["*"]  # a private listener; workers use any name that the network gives it
MIDDLEWARE = [
    "apps.core.http.asgi.RequestIdMiddleware",
    "apps.core.http.statement_limits.RefuseStoppedStatements",
    "apps.core.http.origin.OriginMiddleware",
    "django.middleware.common.CommonMiddleware",
    "apps.core.http.asgi.RefuseNulMiddleware",
]
