"""The worker API process."""

import os
from typing import cast

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apps.config.settings.internal")  # noqa: TID251 - Django's own entry point
django.setup(set_prefix=False)

import apps.config.urls_internal  # noqa: E402, F401 - else the first request imports every view
from apps.config.monitored import Monitored  # noqa: E402 - needs the app registry
from apps.config.startup import guard_roles, share_interpreter  # noqa: E402 - needs the app registry
from apps.contracts.struct import prepare_types  # noqa: E402 - needs the app registry
from apps.core.http.asgi import Application, DjangoApplication  # noqa: E402
from apps.core.http.body_limits import LimitBodies  # noqa: E402
from apps.core.http.fair_shares import Pace  # noqa: E402
from apps.core.http.garbage import spare_lasting_objects  # noqa: E402
from apps.core.http.turns import TakeTurns  # noqa: E402
from apps.core.messages import tracing  # noqa: E402
from apps.core.objects.views import OBJECT_LIMIT  # noqa: E402

guard_roles()
share_interpreter()
prepare_types()
spare_lasting_objects()
tracing.start("internal")
# Requests share one interpreter and twelve database connections.
_turns = TakeTurns(
    LimitBodies(cast(Application, DjangoApplication()), [OBJECT_LIMIT]),
    places=4, most_of_one=1, most_waiting=32, wait_seconds=10.0,
    pace=Pace(prompt=30, per_second=10, wait_seconds=10.0),  # a run makes a call every few seconds, at most two in one
)  # fmt: skip
application = Monitored(_turns, process="internal")
