"""The worker API process."""

import os
from typing import cast

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apps.config.settings.internal")  # noqa: TID251 - Django's own entry point
django_application = get_asgi_application()

from apps.config.startup import guard_roles  # noqa: E402 - needs the app registry
from apps.core.http import Application, LimitBodies  # noqa: E402
from apps.core.object_views import OBJECT_LIMIT  # noqa: E402

guard_roles()
application = LimitBodies(cast(Application, django_application), [OBJECT_LIMIT])
