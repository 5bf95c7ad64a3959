"""Build the documentation as a site of plain files: the help of the product, for a web server or a folder.

    python -m scripts.with_services .venv/bin/python -m scripts.assets.docs_site [--out dist/docs] [--url https://…]

Pages, quickstart, reference and styles are those of the help, so there is one source. The search runs in the browser.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import django

from scripts.processes import REPOSITORY

OUT = REPOSITORY / "dist/docs"
_SEARCH = Path(__file__).with_name("docs_search.js")
_MODEL = "llama-3.1-8b"  # in the quickstart, where the product names one of the reader's
_PLAIN_FILES = {"staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of the site; it is replaced")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the installation that samples name")
    given = parser.parse_args()
    django.setup()
    from django.conf import settings  # noqa: PLC0415 - after django.setup()
    from django.test import override_settings  # noqa: PLC0415

    with override_settings(PUBLIC_URL=given.url, STORAGES=settings.STORAGES | _PLAIN_FILES):
        count = build(given.out)
    print(f"{count} pages in {given.out}")
    return 0


def build(out: Path) -> int:
    """Write the site and return the number of its pages. Call django.setup() first."""
    from apps.interfaces.web.help.pages import PAGES, Audience, render_page  # noqa: PLC0415 - needs the app registry

    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(REPOSITORY / "static/css", out / "static/css")
    shutil.copytree(REPOSITORY / "static/fonts", out / "static/fonts")
    for name in ("favicon.svg", "icons.svg"):
        shutil.copy(REPOSITORY / "static" / name, out / "static")
    shutil.copy(_SEARCH, out / "search.js")
    made = _Site(out)
    for page in PAGES:
        rendered = render_page(page, address=address_of)
        made.write(page.slug, "page", title=rendered.title, summary=page.summary, rendered=rendered)
        made.index(page.slug, rendered.title, rendered.passages)
        if page.audience is not Audience.DECISIONS:
            made.list(page.audience.value, page.slug, rendered.title, page.summary)
    _write_made_from_code(made)
    made.write("index", "index", title="Documentation", summary="", groups=list(made.listed.items()))
    (out / "passages.js").write_text(f"const PASSAGES = {json.dumps(made.passages, ensure_ascii=False)};\n")
    return made.count


def address_of(slug: str) -> str:
    return f"{slug}.html"


def _write_made_from_code(made: "_Site") -> None:
    """Write the quickstart and the reference."""
    from django.conf import settings  # noqa: PLC0415 - after django.setup()

    from apps.interfaces.web.help.pages import QUICKSTART, REFERENCE, Audience  # noqa: PLC0415
    from apps.interfaces.web.help.reference import api_groups, list_passages  # noqa: PLC0415
    from apps.interfaces.web.help.search import list_documents  # noqa: PLC0415
    from apps.interfaces.web.help.views import calls_as_html  # noqa: PLC0415
    from apps.interfaces.web.shell.code_samples import chat_samples, first_job_samples  # noqa: PLC0415
    from apps.interfaces.web.shell.first_job import SAMPLE  # noqa: PLC0415

    about = {each.slug: each for each in list_documents()}
    train = first_job_samples(model=_MODEL, sample_url=f"{settings.PUBLIC_URL}/static/{SAMPLE}")
    key = {"key": "key", "label": "Shell", "code": "export ANNEAL_API_KEY=ann_live_…\n"}
    samples = [
        {"title": "1. Create a key and set it", "samples": [key]},
        {"title": "2. Ask a model", "samples": chat_samples(model=_MODEL, prompt="Where is my card?")},
        {"title": "3. Train your own", "samples": train},
    ]
    more: dict[str, dict[str, Any]] = {QUICKSTART: {"groups": samples}, REFERENCE: {"calls": calls_as_html("en")}}
    for slug, values in more.items():
        made.write(slug, slug, title=about[slug].title, summary=about[slug].summary, **values)
        made.list(Audience.START.value, slug, about[slug].title, about[slug].summary)
    made.index(QUICKSTART, about[QUICKSTART].title, ())
    made.index(REFERENCE, about[REFERENCE].title, tuple(list_passages(api_groups())))


class _Site:
    """The pages written so far, the data of the search, and the list of the first page."""

    def __init__(self, out: Path) -> None:
        self.count = 0
        self.passages: list[dict[str, str]] = []
        self.listed: dict[str, list[dict[str, str]]] = {}
        self._out = out
        self._styles = sorted(path.name for path in (out / "static/css").iterdir())

    def write(self, slug: str, template: str, **context: object) -> None:
        from django.conf import settings  # noqa: PLC0415 - after django.setup()
        from django.template.loader import render_to_string  # noqa: PLC0415

        html = render_to_string(f"help/site/{template}.html", context | {"styles": self._styles})
        (self._out / address_of(slug)).write_text(html.replace(f'"{settings.STATIC_URL}', '"static/'))
        self.count += 1

    def index(self, slug: str, title: str, passages: tuple[Any, ...]) -> None:
        self.passages.append({"page": title, "title": "", "address": address_of(slug), "text": ""})
        for each in passages:
            address = f"{address_of(slug)}#{each.anchor}" if each.anchor else address_of(slug)
            self.passages.append({"page": title, "title": each.title, "address": address, "text": each.text})

    def list(self, audience: str, slug: str, title: str, summary: str) -> None:
        page = {"address": address_of(slug), "title": title, "summary": summary}
        self.listed.setdefault(audience, []).append(page)


if __name__ == "__main__":
    sys.exit(main())
