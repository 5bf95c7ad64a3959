"""The door to signed objects."""

import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from django.test import override_settings

from apps.core.http.asgi import DjangoApplication
from tests.integration.core import object_calls
from tests.support.asgi import origin  # noqa: F401 - a fixture
from tests.support.attempts import claim  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def web_url() -> Iterator[str]:
    """The signed-object door, as the web and internal processes serve it, in a real ASGI server."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with override_settings(ROOT_URLCONF=object_calls.__name__, MIDDLEWARE=[], INTERNAL_URL=url, PUBLIC_URL=url):
        server = uvicorn.Server(uvicorn.Config(DjangoApplication(), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield url
        server.should_exit = True
        thread.join(timeout=10)
