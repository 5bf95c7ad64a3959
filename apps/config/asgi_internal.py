"""The worker API process."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apps.config.settings.internal")  # noqa: TID251 - Django's own entry point
application = get_asgi_application()

from apps.config.startup import guard_roles  # noqa: E402 - needs the app registry

guard_roles()
