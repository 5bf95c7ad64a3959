"""The public origin as it is deployed, uvicorn in front of Django, in a thread of the test's process."""

import functools
import mimetypes
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from django.conf import settings
from django.contrib.staticfiles import finders

from apps.core.http.asgi import Application, DjangoApplication, Receive, Scope, Send
from apps.core.http.connections import Connection
from apps.interfaces.web.edge.front_door import FrontDoor
from apps.interfaces.web.edge.request_limits import WebLimits

NO_LIMITS = WebLimits(1_000_000, 1_000_000, 8)


class StaticFiles:
    """ASGI: answers for static files from memory, and passes all other requests on."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(settings.STATIC_URL):
            await self._application(scope, receive, send)
            return
        content, kind = _static_file(scope["path"].removeprefix(settings.STATIC_URL))
        headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
        headers += [(b"cache-control", b"max-age=86400")] if content else []
        await send({"type": "http.response.start", "status": 200 if content else 404, "headers": headers})
        await send({"type": "http.response.body", "body": content})


@functools.cache
def _static_file(path: str) -> tuple[bytes, bytes]:
    """Return the content of a static file and its type; no content if there is none of this name."""
    found = finders.find(path)
    content = Path(found).read_bytes() if isinstance(found, str) else b""
    return content, (mimetypes.guess_type(path)[0] or "application/octet-stream").encode()


@contextmanager
def serving(application: Application) -> Iterator[str]:
    """Serve an ASGI application on the loopback interface until the block ends; give its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        configuration = uvicorn.Config(
            application, http=Connection, log_level="error", lifespan="on", ws="none", proxy_headers=False
        )
        server = uvicorn.Server(configuration)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def origin(transactional_db: None) -> Iterator[str]:
    """Give the address of the front door before the real Django; its gateway is not running."""
    with serving(FrontDoor(DjangoApplication(), gateway_url="http://127.0.0.1:1", limits=NO_LIMITS)) as address:
        yield address
