"""The web process: dashboard and public API; it passes inference through to the gateway."""

import os
import sys
from typing import Any, cast

import django
from django.conf import settings
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apps.config.settings.dev")  # noqa: TID251 - Django's own entry point
django.setup(set_prefix=False)

import apps.config.urls  # noqa: E402, F401 - else the first request imports every page
from apps.config.monitored import Monitored  # noqa: E402 - needs the app registry
from apps.config.startup import guard_roles, share_interpreter  # noqa: E402 - needs the app registry
from apps.contracts.struct import prepare_types  # noqa: E402
from apps.core.http.asgi import Application, DjangoApplication  # noqa: E402
from apps.core.http.garbage import spare_lasting_objects  # noqa: E402
from apps.core.messages import tracing  # noqa: E402
from apps.interfaces.web.edge.busy_process import BusyProcess  # noqa: E402
from apps.interfaces.web.edge.front_door import FrontDoor  # noqa: E402
from apps.interfaces.web.edge.request_limits import WebLimits  # noqa: E402

guard_roles()
share_interpreter()
prepare_types()
spare_lasting_objects()
tracing.start("web")
_limits = WebLimits(settings.WEB_REQUESTS_PER_MINUTE, settings.WEB_SECONDS_PER_MINUTE, settings.WEB_PLACES)
_django = cast(Application, DjangoApplication())
_busy = BusyProcess([sys.executable, "-m", "apps.config.asgi_busy"])
application: Any = Monitored(
    FrontDoor(_django, gateway_url=settings.GATEWAY_URL, limits=_limits, busy=_busy, origins=settings.API_ORIGINS),
    process="web",
)
if settings.TRUSTED_PROXIES:
    application = ProxyHeadersMiddleware(application, trusted_hosts=settings.TRUSTED_PROXIES)
