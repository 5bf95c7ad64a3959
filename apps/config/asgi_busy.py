"""The views of callers that use much, behind the web process: `python -m apps.config.asgi_busy SOCKET`.

The web process starts it (apps/interfaces/web/edge/busy_process.py), applies all limits on requests and bodies, and
passes the caller's address on.
"""

import os
import sys
import threading
from typing import Any, cast

import django
import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

_NICENESS = 10  # the web process comes first where processors are scarce
if __name__ == "__main__":
    os.nice(_NICENESS)  # before the imports, which take a second
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "apps.config.settings.dev")  # noqa: TID251 - Django's own entry point
django.setup(set_prefix=False)

import apps.config.urls  # noqa: E402, F401 - else the first request imports every page
from apps.config.startup import guard_roles, share_interpreter  # noqa: E402 - needs the app registry
from apps.contracts.struct import prepare_types  # noqa: E402 - needs the app registry
from apps.core.http.asgi import Application, DjangoApplication, ReportProcessorSeconds  # noqa: E402
from apps.core.http.garbage import spare_lasting_objects  # noqa: E402
from apps.core.messages import tracing  # noqa: E402

_views = ReportProcessorSeconds(cast(Application, DjangoApplication()))
# Only the web process reaches the socket, so its x-forwarded-for is believed.
application: Any = ProxyHeadersMiddleware(cast(Any, _views), trusted_hosts="*")


def main(socket: str) -> None:
    """Serve until the standard input ends, so that this process never outlives the one in front."""
    guard_roles()
    share_interpreter()
    prepare_types()
    spare_lasting_objects()
    tracing.start("web")
    server = uvicorn.Server(
        uvicorn.Config(
            application, uds=socket, lifespan="off", ws="none", access_log=False, server_header=False,
            date_header=False, proxy_headers=False, timeout_keep_alive=75, timeout_graceful_shutdown=4,
        )
    )  # fmt: skip
    threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    server.run()


def _end_with_input(server: uvicorn.Server) -> None:
    sys.stdin.buffer.read()
    server.should_exit = True


if __name__ == "__main__":
    main(sys.argv[1])
