"""The worker API process."""

import os
from typing import cast

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apps.config.settings.internal")  # noqa: TID251 - Django's own entry point
django.setup(set_prefix=False)

from apps.config.startup import guard_roles  # noqa: E402 - needs the app registry
from apps.core.http.asgi import Application, DjangoApplication, LimitBodies  # noqa: E402
from apps.core.http.turns import TakeTurns  # noqa: E402
from apps.core.objects.views import OBJECT_LIMIT  # noqa: E402

guard_roles()
# Requests share one interpreter and twelve database connections.
application = TakeTurns(
    LimitBodies(cast(Application, DjangoApplication()), [OBJECT_LIMIT]),
    places=4, most_of_one=1, most_waiting=16, wait_seconds=10.0, calls_per_minute=1_200,
)  # fmt: skip
