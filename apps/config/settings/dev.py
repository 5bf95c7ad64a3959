"""One machine, plain HTTP: what `make demo` and `make dev` run."""

from apps.config.settings.base import *  # noqa: F403
from apps.config.settings.base import DEBUG, STORAGES

if DEBUG:
    STORAGES = STORAGES | {"staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}}
