"""The documentation site: every page of the help as a file, every link leads somewhere, and the search knows it all."""

import html
import json
import re
from pathlib import Path

import pytest

from apps.interfaces.web.help.pages import PAGES
from scripts.assets.docs_site import build


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    assert build(out) == len(PAGES) + 3  # the first page, the quickstart and the reference
    return out


@pytest.mark.slow
def test_every_address_leads_to_a_file_and_a_section(site: Path) -> None:
    pages = {path.name: path.read_text() for path in site.glob("*.html")}
    ids = {name: set(re.findall(r'\bid="([^"]+)"', page)) for name, page in pages.items()}

    for name, page in pages.items():
        for address in re.findall(r'\b(?:href|src)="([^"]+)"', page):
            if not address.startswith(("http:", "https:", "mailto:")):
                path, _, anchor = html.unescape(address).partition("#")
                assert (site / (path or name)).is_file(), (name, address)
                assert not path.endswith(".html") or not anchor or anchor in ids[path], (name, address)


@pytest.mark.slow
def test_the_search_reads_pages_calls_commands_and_codes(site: Path) -> None:
    written = (site / "passages.js").read_text()
    passages = json.loads(written.removeprefix("const PASSAGES = ").rstrip().removesuffix(";"))
    addresses = {passage["address"] for passage in passages}

    assert {f"{page.slug}.html" for page in PAGES} | {"quickstart.html", "reference.html"} <= addresses
    assert "command-line.html#anneal-jobs-watch" in addresses and "errors.html#invalid_value" in addresses
    assert "reference.html#job_list_post" in addresses


def test_the_quickstart_has_three_languages(site: Path) -> None:
    page = html.unescape((site / "quickstart.html").read_text())

    assert "curl http" in page and "from openai import OpenAI" in page and 'import OpenAI from "openai"' in page
