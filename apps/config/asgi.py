"""The web process: dashboard and public API, with inference passed through to the gateway."""

import os

import django
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apps.config.settings.dev")  # noqa: TID251 - Django's own entry point
django.setup(set_prefix=False)

import apps.config.urls  # noqa: E402, F401 - else the first request imports every page
from apps.config.startup import guard_roles  # noqa: E402 - needs the app registry
from apps.core.http import DjangoApplication  # noqa: E402
from apps.web.front_door import FrontDoor  # noqa: E402

guard_roles()
application = FrontDoor(DjangoApplication(), gateway_url=settings.GATEWAY_URL)
