"""Take a screenshot of every page of a running `make demo` or `make dev`, in both themes and two widths.

    .venv/bin/python -m scripts.screenshots [--home DIR] [--into DIR]

Signs in as the demo's member and follows all links; of pages that differ only in an id, it takes one.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from scripts.installation.clients import find_browser
from scripts.processes import REPOSITORY

SIZES = {"wide": (1440, 900), "narrow": (390, 780)}
THEMES = ("light", "dark")
NOT_FOLLOWED = re.compile(r"/accounts/logout|/objects/|/static/|/download|/export|/api/")
AN_ID = re.compile(r"[a-z]+[-_][0-9a-z]{20,}|\d+")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=REPOSITORY / ".anneal")
    parser.add_argument("--into", type=Path, help="default: HOME/screenshots")
    given = parser.parse_args()
    if not (given.home / "ready.json").exists():
        sys.stderr.write("nothing runs there: start `make dev` first\n")
        return 1
    into = given.into or given.home / "screenshots"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"])
        taken = _take_all(browser, given.home, into)
        browser.close()
    sys.stdout.write(f"{taken} pictures in {into}\n")
    return 0


def _take_all(browser: Browser, home: Path, into: Path) -> int:
    url = json.loads((home / "ready.json").read_text())["public_url"]
    account = json.loads((home / "demo.json").read_text())
    taken = 0
    paths: list[str] = []
    for theme in THEMES:
        for size, (width, height) in SIZES.items():
            context = browser.new_context(
                base_url=url, viewport={"width": width, "height": height}, reduced_motion="reduce"
            )
            context.add_cookies([{"name": "theme", "value": theme, "url": url}])
            _sign_in(context, account["email"], account["password"])
            page = context.new_page()
            paths = paths or list(_find_paths(page))
            for path in paths:
                _take(page, path, into / f"{theme}-{size}")
            taken += len(paths)
            context.close()
    return taken


def _sign_in(context: BrowserContext, email: str, password: str) -> None:
    page = context.new_page()
    page.goto("/accounts/login/")
    page.fill("input[name=login]", email)
    page.fill("input[name=password]", password)
    page.press("input[name=password]", "Enter")
    page.wait_for_url(lambda address: "/accounts/login" not in address)
    page.close()


def _find_paths(page: Page) -> Iterator[str]:
    """Yield every page that links lead to, one of each kind, in the order found."""
    queue, seen = ["/"], {"/"}
    while queue:
        path = queue.pop(0)
        response = page.goto(path, wait_until="domcontentloaded")
        if response is None or not response.ok or "text/html" not in response.headers.get("content-type", ""):
            continue
        yield path
        for link in page.eval_on_selector_all("a[href]", "links => links.map(link => link.href)"):
            parts = urlsplit(link)
            kind = AN_ID.sub("ID", parts.path)
            if parts.netloc == urlsplit(page.url).netloc and kind not in seen and not NOT_FOLLOWED.search(kind):
                seen.add(kind)
                queue.append(parts.path)


def _take(page: Page, path: str, folder: Path) -> None:
    page.goto(path, wait_until="load")
    name = AN_ID.sub("ID", path).strip("/").replace("/", "-") or "overview"
    page.screenshot(path=folder / f"{name}.png", full_page=True)


if __name__ == "__main__":
    sys.exit(main())
