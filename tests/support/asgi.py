"""The public origin as it is deployed, uvicorn in front of Django, in a thread of the test's process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from apps.core.http import Application, DjangoApplication
from apps.web.front_door import FrontDoor


@contextmanager
def serving(application: Application) -> Iterator[str]:
    """Serve an ASGI application on the loopback interface until the block ends; give its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(application, log_level="error", lifespan="on", ws="none"))
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
    with serving(FrontDoor(DjangoApplication(), gateway_url="http://127.0.0.1:1")) as address:
        yield address
