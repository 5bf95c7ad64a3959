"""The public origin as it is deployed, uvicorn in front of Django, in a thread of the test's process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from apps.core.http.asgi import Application, DjangoApplication
from apps.core.http.connections import Connection
from apps.interfaces.web.edge.front_door import FrontDoor
from apps.interfaces.web.edge.request_limits import WebLimits

NO_LIMITS = WebLimits(1_000_000, 1_000_000, 8)


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
