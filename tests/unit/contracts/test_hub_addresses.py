"""Which addresses a client of the hub asks, and which of them get the token."""

import pytest

from apps.contracts.addresses.hub import HubAddresses

PUBLIC = HubAddresses(endpoint="https://huggingface.co")
MIRROR = HubAddresses(endpoint="http://hub.lan:8080/", blob_hosts=("files.lan", "10.0.0.7:9000"))


@pytest.mark.parametrize(
    ("addresses", "url", "is_allowed", "is_hub"),
    [
        (PUBLIC, "https://huggingface.co/api/models/a/b", True, True),
        (PUBLIC, "https://huggingface.co:443/a/b", True, True),
        (PUBLIC, "http://huggingface.co/a/b", False, False),
        (PUBLIC, "https://cdn-lfs-us-1.hf.co/blob", True, False),
        (PUBLIC, "https://cas-bridge.xethub.hf.co/blob", True, False),
        (PUBLIC, "https://hf.co.evil.test/blob", False, False),
        (PUBLIC, "https://evilhf.co/blob", False, False),
        (PUBLIC, "https://huggingface.co@evil.test/", False, False),
        (PUBLIC, "https://cdn.hf.co:8443/blob", False, False),
        (PUBLIC, "http://169.254.169.254/latest/meta-data", False, False),
        (PUBLIC, "https://[::1]/", False, False),
        (PUBLIC, "https://huggingface.co:99999/", False, False),
        (MIRROR, "http://hub.lan:8080/a/b", True, True),
        (MIRROR, "http://hub.lan/a/b", False, False),
        (MIRROR, "http://files.lan/blob", True, False),
        (MIRROR, "http://10.0.0.7:9000/blob", True, False),
        (MIRROR, "http://10.0.0.7/blob", False, False),
    ],
)
def test_known_hosts_are_asked_and_the_hub_alone_gets_the_token(addresses, url, is_allowed, is_hub):
    assert (addresses.is_allowed(url), addresses.is_hub(url)) == (is_allowed, is_hub)
