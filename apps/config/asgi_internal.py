"""The worker API process."""

import os
from typing import cast

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apps.config.settings.internal")  # noqa: TID251 - Django's own entry point
django.setup(set_prefix=False)

from apps.config.startup import guard_roles  # noqa: E402 - needs the app registry
from apps.core.http import Application, DjangoApplication, LimitBodies  # noqa: E402
from apps.core.object_views import OBJECT_LIMIT  # noqa: E402

guard_roles()
application = LimitBodies(cast(Application, DjangoApplication()), [OBJECT_LIMIT])
