"""deploy/nginx: well-formed, and the same routes and limits as the front door that web has built in."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from django.urls import resolve

from apps.core.http.asgi import MIB
from apps.core.http.connections import MAX_CONNECTIONS
from apps.finetuning.models import Quota
from apps.interfaces.web.edge.front_door import INFERENCE_PATHS
from apps.interfaces.web.edge.request_limits import BODY_LIMITS
from tests.support.waiting import wait_until

NGINX = Path(__file__).resolve().parents[3] / "deploy/nginx"
CONF = (NGINX / "anneal.conf").read_text()
TOKEN = re.compile(r"#[^\n]*|'(?:\\.|[^'])*'|\"(?:\\.|[^\"])*\"|[{};]|[^\s{};]+")


def parse(text: str) -> list[tuple[list[str], list]]:
    """The directives of a file as (words, children). Raises ValueError where braces or semicolons do not match."""
    stack: list[list[tuple[list[str], list]]] = [[]]
    words: list[str] = []
    for token in TOKEN.findall(text):
        match token:
            case ";" | "{" if not words:
                raise ValueError("an empty directive")
            case ";":
                stack[-1].append((words, []))
                words = []
            case "{":
                children: list[tuple[list[str], list]] = []
                stack[-1].append((words, children))
                stack.append(children)
                words = []
            case "}":
                if words or len(stack) == 1:
                    raise ValueError(f"unexpected }} after {words}")
                stack.pop()
            case _ if not token.startswith("#"):
                words.append(token)
    if words or len(stack) > 1:
        raise ValueError(f"unfinished: {words}")
    return stack[0]


SERVER = [children for words, children in parse(CONF) if words == ["server"]][-1]
LOCATIONS = {tuple(words[1:]): children for words, children in SERVER if words[0] == "location"}


def values(children: list[tuple[list[str], list]], name: str) -> list[str]:
    return [" ".join(words[1:]) for words, _ in children if words[0] == name]


def test_no_secret_of_an_address_is_logged() -> None:
    log_format = next(" ".join(words) for words, _ in parse(CONF) if words[:2] == ["log_format", "no_query"])
    assert not re.search(r"\$request\b|request_uri|args|query_string|referer", log_format)
    assert values(SERVER, "access_log") == ["/var/log/nginx/access.log no_query"]

    silent = [key for key, children in LOCATIONS.items() if values(children, "access_log") == ["off"]]
    assert ("/objects/",) in silent
    pattern = re.compile(next(key[1] for key in silent if key[0] == "~"))
    for path in (
        "/accounts/password/reset/key/1-abc-def/",
        "/accounts/confirm-email/MQ:abc/",
        "/invitations/accept/secret",
    ):
        assert pattern.match(path)
        resolve(path)


def test_the_inference_routes_and_no_others_may_go_to_the_gateway() -> None:
    inference = {
        key[1] for key, children in LOCATIONS.items() if any("inference.conf" in v for v in values(children, "include"))
    }

    assert inference == INFERENCE_PATHS
    assert {key[1] for key in LOCATIONS if key[0] == "=" and key[1] in inference} == INFERENCE_PATHS
    assert values(parse((NGINX / "inference.conf").read_text()), "proxy_pass") == ["http://$inference_door"]


@pytest.mark.parametrize("limit", BODY_LIMITS, ids=lambda limit: limit.prefix)
def test_bodies_are_limited_as_behind_the_door(limit: object) -> None:
    prefix, limit_bytes = limit.prefix, limit.limit_bytes  # type: ignore[attr-defined]

    [children] = [children for key, children in LOCATIONS.items() if key[-1] == prefix]

    assert values(children, "client_max_body_size") == [f"{limit_bytes // MIB}m"]


def test_nothing_is_buffered_and_no_client_names_its_own_address() -> None:
    headers = values(SERVER, "proxy_set_header")

    assert values(SERVER, "proxy_buffering") == ["off"] and values(SERVER, "proxy_request_buffering") == ["off"]
    assert "X-Forwarded-For $remote_addr" in headers and "X-Forwarded-Proto $scheme" in headers


def test_the_gateway_gets_every_header_web_gets_and_no_cookie() -> None:
    inference = set(values(parse((NGINX / "inference.conf").read_text()), "proxy_set_header"))

    assert inference - set(values(SERVER, "proxy_set_header")) == {"Cookie $forwarded_cookie"}
    assert set(values(SERVER, "proxy_set_header")) <= inference


def test_a_container_that_was_made_anew_is_found_at_its_new_address() -> None:
    top = parse((NGINX / "upstreams.conf").read_text())
    upstreams = {words[1]: children for words, children in top if words[0] == "upstream"}

    assert values(parse(CONF), "include") == ["/etc/nginx/snippets/upstreams.conf"]
    # Docker's name server; web and the gateway listen on IPv4.
    assert values(top, "resolver") == ["127.0.0.11 valid=5s ipv6=off"]
    for name, port in (("web", 8000), ("gateway", 8002)):
        assert values(upstreams[name], "server") == [f"{name}:{port} resolve"] and values(upstreams[name], "zone")
    image = yaml.safe_load((NGINX.parent / "compose.yaml").read_text())["services"]["nginx"]["image"]
    version = tuple(map(int, image.removeprefix("nginx:").split(".")))
    assert version >= (1, 27, 3)  # the first whose open source has `resolve`


def test_a_renewed_certificate_is_taken(tmp_path: Path) -> None:
    """The chart's loop, with a stand-in for nginx that writes down how it is called."""
    certificate, calls = tmp_path / "fullchain.pem", tmp_path / "calls"
    (tmp_path / "privkey.pem").write_text("key")
    certificate.write_text("old")
    stand_in = tmp_path / "nginx"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n[ "$1" = -s ] || exec sleep 60\n')
    stand_in.chmod(0o755)
    script = (NGINX.parent / "helm/anneal/files/serve.sh").read_text()
    script = script.replace("/etc/nginx/certs", str(tmp_path)).replace("sleep 60", "sleep 0.02")
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    with subprocess.Popen(["sh", "-c", script], env=path, start_new_session=True) as server:
        try:
            wait_until(lambda: calls.exists() and calls.read_text() == "-g daemon off;\n")
            certificate.write_text("new")
            wait_until(lambda: "-s reload\n" in calls.read_text())
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def per_minute(rate: str) -> int:
    number, unit = re.fullmatch(r"(\d+)r/([sm])", rate).groups()  # type: ignore[union-attr]
    return int(number) * (60 if unit == "s" else 1)


def test_an_address_is_limited_and_no_sooner_than_behind_the_door() -> None:
    """An office behind one address may have several organizations, each with the limits that an organization has."""
    top = parse(CONF)
    rates = {
        words[2].split("=")[1].split(":")[0]: words[3].split("=")[1] for words, _ in top if words[0] == "limit_req_zone"
    }
    inference = parse((NGINX / "inference.conf").read_text())
    quota = Quota()
    for children, zone, most_requests, most_open in (
        (SERVER, "rest", 9 * 600, MAX_CONNECTIONS),  # of an address and its static files, docs/limits.md
        (inference, "inference", 4 * quota.requests_per_minute, 4 * quota.concurrent_requests),
    ):
        [request] = values(children, "limit_req")
        assert re.fullmatch(rf"zone={zone} burst=\d+ nodelay", request)
        assert per_minute(rates[zone]) >= most_requests
        assert values(children, "limit_conn") == [f"open_{zone} {most_open}"]
    assert {key for words, _ in top if words[0] in ("limit_req_zone", "limit_conn_zone") for key in words[1:2]} == {
        "$client_network"
    }
    assert values(top, "limit_req_status") == values(top, "limit_conn_status") == ["429"]
    assert "429 @too_many" in values(SERVER, "error_page")


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", None), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2:"), ("2001:db8:1:2::6", "2001:db8:1:2:"),
        ("2001:db8:1::6", "2001:db8:1::"), ("2001:db8:1::4:5:6", "2001:db8:1::"), ("2001:db8::6", "2001:db8::"),
        ("2001:db8::3:4:5:6", "2001:db8::"), ("2600::1", "2600::"), ("2600::3:4:5:6", "2600::"),
        ("2600::2:3:4:5:6", "2600::2:"),
    ],
)  # fmt: skip
def test_an_ipv6_customer_counts_by_its_network(address: str, network: str | None) -> None:
    [children] = [children for words, children in parse(CONF) if words[:2] == ["map", "$remote_addr"]]
    patterns = [words[0].strip('"')[1:].replace("?<", "?P<") for words, _ in children if words[1] == "$network"]

    found = next((found for pattern in patterns if (found := re.match(pattern, address))), None)

    assert (found and found["network"]) == network


def installed_nginx() -> tuple[int, ...]:
    """Return the version of the installed nginx; () if there is none."""
    if not shutil.which("nginx"):
        return ()
    said = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr
    return tuple(map(int, re.findall(r"\d+", said)[:3]))


@pytest.mark.skipif(installed_nginx() < (1, 27, 3), reason="no nginx here has `resolve`, which 1.27.3 introduced")
def test_nginx_itself_accepts_the_files(tmp_path: Path) -> None:
    certificate = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*certificate, "-keyout", "privkey.pem", "-out", "fullchain.pem"], cwd=tmp_path, check=True)
    conf = CONF.replace("/etc/nginx/certs", str(tmp_path)).replace("/etc/nginx/snippets", str(NGINX))
    conf = conf.replace("/var/log/nginx", str(tmp_path))
    upstreams = re.sub(r"server (web|gateway):", "server 127.0.0.1:", (NGINX / "upstreams.conf").read_text())
    (tmp_path / "upstreams.conf").write_text(upstreams)
    conf = conf.replace(f"{NGINX}/upstreams.conf", f"{tmp_path}/upstreams.conf")
    (tmp_path / "anneal.conf").write_text(conf)
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid; events {{}} http {{ include {tmp_path}/anneal.conf; }}")

    checked = subprocess.run(
        ["nginx", "-t", "-p", tmp_path, "-c", tmp_path / "nginx.conf"], capture_output=True, text=True
    )

    assert checked.returncode == 0, checked.stderr
