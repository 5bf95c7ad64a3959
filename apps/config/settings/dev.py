"""Settings for one machine over plain HTTP, used by `make demo` and `make dev`."""

from apps.config.settings.base import *  # noqa: F403
from apps.config.settings.base import DEBUG, STORAGES

if DEBUG:
    STORAGES = STORAGES | {"staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}}
