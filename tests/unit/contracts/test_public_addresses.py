"""Servers that customers name: public ones alone, in every notation."""

import msgspec
import pytest

from apps.contracts.addresses.customer_servers import check_server
from apps.contracts.addresses.machines import leads_elsewhere
from apps.contracts.addresses.networks import is_public
from apps.contracts.worker_api import ClaimRequest


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"]
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "239.1.1.1", "240.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "::", "::1", "fe80::1", "fe80::1%eth0",
        "fc00::1", "fec0::1", "ff02::1", "ff0e::1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "::7f00:1", "::a9fe:a9fe",
        "64:ff9b::a9fe:a9fe", "64:ff9b::7f00:1", "64:ff9b:1::808:808", "2002:a9fe:a9fe::", "2002:7f00:1::1",
        "2001:0:808:808:0:0:f5ff:fffe", "2001:db8::1",
        "168.63.129.16", "::ffff:168.63.129.16", "64:ff9b::a83f:8110", "100.100.100.200", "192.0.0.192",
        "fd00:ec2::254", "::ffff:0:7f00:1", "::ffff:0:a00:1", "not an address", "",
    ],
)  # fmt: skip
def test_addresses_of_networks_of_our_own_are_not(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "https://mlflow.example.com",
        "https://mlflow.example.com:443/base/",
        "https://8.8.8.8",
        "https://xn--mnchen-3ya.de",
    ],
)
def test_a_public_server_may_be_named(url: str) -> None:
    assert check_server(url).hostname in url


@pytest.mark.parametrize(
    "url",
    [
        "", "mlflow.example.com", "http://mlflow.example.com", "ftp://mlflow.example.com", "https://", "https:///path",
        "https://mlflow.example.com:5000", "https://mlflow.example.com:80", "https://mlflow.example.com:99999",
        "https://mlflow.example.com:port", "https://mlflow.example.com:0", "https://user@mlflow.example.com",
        "https://@mlflow.example.com", "https://user:pass@mlflow.example.com", "https://mlflow.example.com?a=b",
        "https://mlflow.example.com#a", "https://[::1", "https://[::1]", "https://[::ffff:127.0.0.1]", "https://127.0.0.1",
        "https://127.1", "https://2130706433", "https://0x7f000001", "https://0177.0.0.1", "https://169.254.169.254",
        "https://localhost", "https://a.localhost", "https://metadata.google.internal", "https://printer.local",
        "https://intranet", "https://localhost.", "https://a..example.com", "https://-a.example.com",
        "https://exa mple.com", "https://exämple.com", "https://①②⑦.⓪.⓪.①", "https://mlflow.example.com/\n", "https://mlflow.example.com\\@10.0.0.1",
        "https://mlflow.example.com/" + "a" * 400, "https://" + "a" * 64 + ".example.com", "https://[fe80::1%25eth0]",
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_what_to_give(url: str) -> None:
    with pytest.raises(ValueError, match=r"https address|public internet|port|ASCII"):
        check_server(url)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1", "192.168.1.9", "8.8.8.8", "node-1", "node-1.cluster.local", "fd12::1",
        "localhost-1", "my-localhost", "node-1.localdomain",
    ],
)  # fmt: skip
def test_machines_meet_at_names_and_addresses_of_a_cluster(address: str) -> None:
    assert leads_elsewhere(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.1", "0x7f.1", "2130706433", "017700000001", "0", "0.0.0.0", "localhost", "a.localhost.",
        "169.254.169.254", "0xa9fea9fe", "100.100.100.200", "224.0.0.1", "::1", "::ffff:127.0.0.1", "fe80::1", "a:b",
        "127.0.0.1.", "127.1..", "0x7f000001.", "169.254.169.254.", "::1.", ".", "LOCALHOST.",
        "ip6-localhost", "ip6-loopback", "IP6-Localhost.", "localhost6", "localhost4", "localhost.localdomain",
        "LOCALHOST.LocalDomain.", "localhost6.localdomain6..", "ipv6-loopback", "loopback", "ip6-allnodes",
        "broadcasthost", "localhost.cluster.local",
    ],
)  # fmt: skip
def test_machines_do_not_meet_where_each_finds_itself_or_a_metadata_service(address: str) -> None:
    assert not leads_elsewhere(address)


def test_the_name_of_a_machine_ends_without_a_line_break() -> None:
    assert msgspec.convert({"address": "node-1"}, ClaimRequest).address == "node-1"
    with pytest.raises(msgspec.ValidationError, match="address"):
        msgspec.convert({"address": "node-1\n"}, ClaimRequest)
