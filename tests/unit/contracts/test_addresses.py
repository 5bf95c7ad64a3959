"""Where replicas may be: nothing local and no metadata service, in any spelling, unless the installation says so."""

import pytest

from apps.contracts.addresses.replicas import AddressRefused, AddressRules

NONE = AddressRules.read([])


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8003", "http://localhost:8003", "http://a.localhost", "http://[::1]:8003", "http://0.0.0.0",
        "http://ip6-localhost:8003", "http://Localhost.localdomain", "http://localhost6:1",
        "http://[::]", "http://169.254.169.254", "http://[fe80::1]:1", "http://[fe80::1%25eth0]:1", "http://[fec0::1]",
        "http://224.0.0.1", "http://255.255.255.255", "http://240.0.0.1",
        "http://100.100.100.200", "http://192.0.0.192", "http://168.63.129.16", "http://[fd00:ec2::254]",
        "http://[::ffff:127.0.0.1]:1", "http://[::ffff:a9fe:a9fe]", "http://[::7f00:1]", "http://[::ffff:0:7f00:1]",
        "http://[64:ff9b::a9fe:a9fe]", "http://[64:ff9b:1::a9fe:a9fe]", "http://[2002:a9fe:a9fe::]",
        "http://[2001:0:7f00:1::]",
    ],
)  # fmt: skip
def test_local_and_metadata_addresses_are_refused_in_every_form(url):
    with pytest.raises(AddressRefused, match="local, reserved"):
        NONE.check(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.1", "http://2130706433", "http://0177.0.0.1", "http://0x7f.0.0.1", "http://0x7f000001",
        "http://10.0.0.08", "http://1.2.3.4.5", "http://１２７.0.0.1", "http://a_b..c", "http://-a", "http://gpu-1.:80",
        "http://a b", "http://é",
    ],
)  # fmt: skip
def test_other_spellings_of_numbers_and_odd_names_are_refused(url):
    with pytest.raises(AddressRefused, match="no host name and no IP address"):
        NONE.check(url)


@pytest.mark.parametrize(
    "url",
    [
        "", "gpu-1:8003", "//gpu-1", "ftp://gpu-1", "file:///etc/passwd", "http://", "http://:80", "http://gpu-1/path",
        "http://gpu-1?x", "http://gpu-1#x", "http://user@gpu-1", "http://user:word@gpu-1", "http://gpu-1:0",
        "http://gpu-1:99999", "http://gpu-1:8a", "http://[::1", "http://gpu-1\r\nX: y", "http://gpu-1\\@127.0.0.1",
        "http://" + "a" * 400,
    ],
)  # fmt: skip
def test_an_address_is_scheme_host_and_port_and_nothing_more(url):
    with pytest.raises(AddressRefused):
        NONE.check(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.5:8003",
        "https://gpu-1.example.com",
        "http://[fd12::5]:8003",
        "http://203.0.114.9",
        "HTTP://Gpu-1:1",
    ],
)
def test_another_machine_is_possible_and_needs_an_operators_word(url):
    assert NONE.check(url) is False


def test_what_the_installation_names_needs_none():
    rules = AddressRules.read(["10.0.0.0/8", "fd12::/16", "gpu-1", "127.0.0.0/8"])

    for url in (
        "http://10.0.0.5:8003",
        "http://[fd12::5]",
        "http://GPU-1:8003",
        "http://127.0.0.1:1",
        "http://localhost",
    ):
        assert rules.check(url) is (url != "http://localhost")  # the name was not named
    assert rules.check("http://gpu-2") is False
    with pytest.raises(AddressRefused):
        rules.check("http://[::ffff:7f00:1]")


@pytest.mark.parametrize("entry", ["http://gpu-1", "10.0.0.1/8", "a b", "gpu-1:80", "*"])
def test_an_entry_that_is_no_place_ends_the_start(entry):
    with pytest.raises(ValueError, match=r"host bits|no network"):
        AddressRules.read([entry])


def test_sockets_are_those_that_are_named_or_right_below_a_named_folder(tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "redis.sock"
    (folder / "deep").mkdir(parents=True)
    (folder / "link.sock").symlink_to(outside)
    rules = AddressRules.read([f"unix://{folder}", f"unix://{tmp_path}/one.sock"])

    assert rules.check(f"unix://{folder}/replica.sock") and rules.check(f"unix://{tmp_path}/one.sock")
    for path in (
        outside,
        folder / "deep/x.sock",
        folder / "../redis.sock",
        folder / "link.sock",
        "/run/x",
        f"{folder}/",
    ):
        with pytest.raises(AddressRefused):
            rules.check(f"unix://{path}")
    for url in ("unix://replica.sock", "unix:replica.sock", "unix:////etc/x\n", "unix:///a%2e"):
        with pytest.raises(AddressRefused):
            rules.check(url)
