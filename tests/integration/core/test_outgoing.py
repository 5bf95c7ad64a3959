"""A request to a customer's server goes only to public addresses, and ends in time."""

import threading
import time

import aiohttp
import pytest

from apps.accounts.notices import endpoints, outgoing
from apps.accounts.notices.outgoing import post
from apps.core.errors import InvalidValue


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/", "https://127.0.0.1/", "https://2130706433/", "https://0177.0.0.1/",
        "https://0x7f.1/", "https://[::ffff:10.0.0.1]/", "https://[64:ff9b::a9fe:a9fe]/", "https://169.254.169.254/",
        "https://localhost/", "https://hooks.example.com:8080/", "https://user@hooks.example.com/",
        "http://127.0.0.1/", "https://[::1", "x\x00",
    ],
)  # fmt: skip
def test_addresses_of_private_networks_are_neither_stored_nor_called(organization, alice, url):
    with pytest.raises(InvalidValue) as refused:
        endpoints.create_endpoint(
            organization=organization, url=url, event_types=["batch.completed"], format="slack", by=alice.pk
        )

    assert refused.value.param == "url"
    assert post(url, body=b"", headers={}).error


def test_a_name_that_leads_to_a_private_address_is_not_called(settings, monkeypatch):
    settings.PRIVATE_WEBHOOKS = False

    async def resolve(self: object, host: str, port: int, family: int) -> list[dict[str, object]]:
        return [
            {"hostname": host, "host": each, "port": port, "family": 2, "proto": 0, "flags": 0}
            for each in ("93.184.215.14", "127.0.0.1")
        ]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)

    assert "private address" in post("https://hooks.example.com/", body=b"", headers={}).error


def test_a_silent_name_server_holds_no_delivery_beyond_the_limit(settings, monkeypatch):
    settings.PRIVATE_WEBHOOKS = True
    is_over = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *given, **more: is_over.wait(5) and [])
    monkeypatch.setattr(outgoing, "_TIMEOUT", aiohttp.ClientTimeout(total=0.2))
    started = time.monotonic()

    assert post("https://hooks.example.com/", body=b"", headers={}).error == "No answer in time."
    assert time.monotonic() - started < 3
    is_over.set()
