"""The operator's own name, logo, colour and support address in place of Anneal's."""

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from apps.accounts.models import User
from apps.config.env import MalformedVariable, _hue, _logo

SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'


@pytest.mark.slow
def test_pages_have_the_name_logo_and_colour_of_the_operator(
    alice: User, client: Client, settings: Any, tmp_path: Path
) -> None:
    plain = client.get("/accounts/login/").content.decode()
    settings.BRAND_NAME, settings.BRAND_HUE, settings.BRAND_LOGO = "Tuneworks", 20, tmp_path / "logo.svg"
    settings.BRAND_LOGO.write_bytes(SVG)

    pages = [client.get("/accounts/login/").content.decode()]
    client.force_login(alice)
    pages.append(client.get("/help").content.decode())

    assert "Anneal" in plain and "/brand/" not in plain
    for page in pages:
        assert "· Tuneworks" in page and "Anneal</a>" not in page
        assert 'src="/brand/logo.svg"' in page and "/brand/accent.css" in page
    assert "oklch(0.530 0.190 20)" in client.get("/brand/accent.css").content.decode()


def test_a_logo_is_an_image_that_runs_nothing(client: Client, settings: Any, tmp_path: Path) -> None:
    absent = client.get("/brand/logo.svg"), client.get("/brand/accent.css")
    settings.BRAND_LOGO = tmp_path / "logo.svg"
    settings.BRAND_LOGO.write_bytes(SVG)

    answer = client.get("/brand/logo.svg")

    assert [one.status_code for one in absent] == [404, 404]
    assert (answer["Content-Type"], answer.content) == ("image/svg+xml", SVG)
    policy = answer["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "sandbox" in policy and "script-src" not in policy


@pytest.mark.slow
def test_error_pages_and_help_show_the_support_address(client: Client, settings: Any) -> None:
    settings.SUPPORT_EMAIL = "help@tuneworks.example"

    for path in ("/nowhere", "/help"):
        assert "mailto:help@tuneworks.example" in client.get(path).content.decode()


@pytest.mark.parametrize(
    ("read", "variable", "value", "fix"),
    [
        (_hue, "ANNEAL_BRAND_HUE", "360", "from 0 to 359"),
        (_hue, "ANNEAL_BRAND_HUE", "red", "from 0 to 359"),
        (_logo, "ANNEAL_BRAND_LOGO", "/nowhere/logo.svg", "an SVG file"),
        (_logo, "ANNEAL_BRAND_LOGO", __file__, "an SVG file"),
    ],
)
def test_a_wrong_variable_is_refused_with_what_it_takes(read: Any, variable: str, value: str, fix: str) -> None:
    with pytest.raises(MalformedVariable, match=fix):
        read({variable: value})
