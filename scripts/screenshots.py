"""Take a screenshot of every page of a running `make demo` or `make dev`, in both themes and two widths.

    .venv/bin/python -m scripts.screenshots [--home DIR] [--into DIR] [--readme]

It signs in as the demo's member and follows all links. Of pages that differ only in an id, it takes one. `--readme`
takes only the README's pictures, into docs/pictures. For them, it starts a job and cancels it afterwards.
"""

import argparse
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import openai
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from scripts.installation.clients import find_browser
from scripts.processes import REPOSITORY

SIZES = {"wide": (1440, 900), "narrow": (390, 780)}
THEMES = ("light", "dark")
NOT_FOLLOWED = re.compile(r"/accounts/logout|/objects/|/static/|/download|/export|/api/")
AN_ID = re.compile(r"[a-z]+[-_][0-9a-z]{20,}|\d+")
PICTURES = REPOSITORY / "docs" / "pictures"
QUESTION = "My card still has not arrived. What can I do?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=REPOSITORY / ".anneal")
    parser.add_argument("--into", type=Path, help="default: HOME/screenshots")
    parser.add_argument("--readme", action="store_true", help="only the README's pictures, into docs/pictures")
    given = parser.parse_args()
    if not (given.home / "ready.json").exists():
        sys.stderr.write("nothing runs there: start `make dev` first\n")
        return 1
    into = given.into or given.home / "screenshots"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"])
        if given.readme:
            into, taken = PICTURES, _take_for_readme(browser, given.home)
        else:
            taken = _take_all(browser, given.home, into)
        browser.close()
    sys.stdout.write(f"{taken} pictures in {into}\n")
    return 0


def _take_all(browser: Browser, home: Path, into: Path) -> int:
    taken = 0
    paths: list[str] = []
    for theme in THEMES:
        for size in SIZES:
            page = _signed_in_page(browser, home, theme, size)
            paths = paths or list(_find_paths(page))
            for path in paths:
                _take(page, path, into / f"{theme}-{size}")
            taken += len(paths)
            page.context.close()
    return taken


def _take_for_readme(browser: Browser, home: Path) -> int:
    """Take the compute step, a live job, the playground and the operator's home; a demo's main job has ended before."""
    account = json.loads((home / "demo.json").read_text())
    client = openai.OpenAI(api_key=account["api_key"], base_url=f"{_url(home)}/v1")
    finished = next(job for job in client.fine_tuning.jobs.list() if job.status == "succeeded")
    job = client.fine_tuning.jobs.create(
        model=finished.model,
        training_file=finished.training_file,
        suffix="banking-live",
        extra_body={"budget": {"max_cost_usd": "1"}},
    )
    wizard = {"dataset": finished.training_file, "model": finished.model, "method": "lora", "step": "compute"}
    PICTURES.mkdir(exist_ok=True)
    pages = [_signed_in_page(browser, home, theme, "wide") for theme in THEMES]
    for theme, page in zip(THEMES, pages, strict=True):
        page.goto(f"/jobs/new?{urlencode(wizard)}", wait_until="networkidle")
        _keep(page, f"compute-{theme}")
        page.goto("/staff/", wait_until="networkidle")
        _keep(page, f"operator-{theme}")
        page.goto(f"/playground?{urlencode({'model': finished.fine_tuned_model})}")
        page.get_by_label("Message", exact=True).fill(QUESTION)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".bubble-assistant .txt")).to_have_text([re.compile(r"\w")] * 2, timeout=60_000)
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        _keep(page, f"playground-{theme}")
    for theme, page in zip(THEMES, pages, strict=True):
        page.goto(f"/jobs/{job.id}")
        expect(page.locator("[data-live=step]")).to_have_text(re.compile(r"^[2-9]\d\d$"), timeout=180_000)
        _keep(page, f"job-{theme}")
    client.fine_tuning.jobs.cancel(job.id)
    return 4 * len(THEMES)


def _keep(page: Page, name: str) -> None:
    """Write the window's content as a WebP file, which has a quarter of a PNG's size."""
    Image.open(io.BytesIO(page.screenshot())).save(PICTURES / f"{name}.webp", quality=88, method=6)


def _signed_in_page(browser: Browser, home: Path, theme: str, size: str) -> Page:
    url, account = _url(home), json.loads((home / "demo.json").read_text())
    width, height = SIZES[size]
    context = browser.new_context(base_url=url, viewport={"width": width, "height": height}, reduced_motion="reduce")
    context.add_cookies([{"name": "theme", "value": theme, "url": url}])
    _sign_in(context, account["email"], account["password"])
    return context.new_page()


def _url(home: Path) -> str:
    return str(json.loads((home / "ready.json").read_text())["public_url"])


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
