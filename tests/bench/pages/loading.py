"""How soon a page shows its main part, and how far it moves afterwards, in Chromium behind a slow line.

    python -m tests.bench.pages.loading URL PLACES

Opens the main pages for the first time, each with empty caches and at two widths, at 1.6 Mbit/s with 150 ms to the
first byte of each answer. Prints one JSON object: seconds until the largest part of each page is drawn (LCP), and the
sum of all layout shifts until the page is at rest (CLS counts only those of the worst five seconds).
"""

import json
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from scripts.installation.clients import find_browser

PAGES = (
    ("owner", "/"), ("owner", "/datasets"), ("owner", "/datasets/{file}"), ("owner", "/jobs"),
    ("owner", "/jobs/{live}"), ("owner", "/jobs/new?dataset={file}&step=model"), ("owner", "/adapters"),
    ("owner", "/adapters/{version}"), ("owner", "/usage"), ("operator", "/staff/"),
)  # fmt: skip
_SIZES = ((1440, 900), (390, 780))
_LINE = {"offline": False, "latency": 150, "downloadThroughput": 1.6e6 / 8, "uploadThroughput": 0.75e6 / 8}
_REST_MS = 2_000  # after the page has loaded: scripts have drawn, and what htmx asks for has come
_COOKIE = "sessionid"  # Django's default
# Buffered entries are those since the page began. Shifts after an input of the reader do not count; there is none.
_MEASURE = """(rest) => new Promise((done) => {
  const found = { lcp_s: 0, cls: 0, moved: [] };
  new PerformanceObserver((list) => {
    for (const each of list.getEntries()) { found.lcp_s = each.startTime / 1000; found.shown = each.element?.tagName; }
  }).observe({ type: "largest-contentful-paint", buffered: true });
  new PerformanceObserver((list) => {
    for (const each of list.getEntries()) {
      found.cls += each.value;
      found.moved.push(...each.sources.map((source) => `${source.node?.nodeName}.${source.node?.className ?? ""}`));
    }
  }).observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(found), rest);
})"""


def measure(url: str, places: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the `lcp_s` and the `cls` of each page, with the element `shown` and those that `moved`."""
    found = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        for person, path in PAGES:
            for width, height in _SIZES:
                address = url + path.format(**places)
                found[f"{path} at {width} px"] = _open(browser, address, places[person], width, height)
        browser.close()
    return found


def _open(browser: Browser, address: str, session: str, width: int, height: int) -> dict[str, Any]:
    context = browser.new_context(viewport={"width": width, "height": height})
    context.add_cookies([{"name": _COOKIE, "value": session, "url": address}])
    page = context.new_page()
    line = context.new_cdp_session(page)
    line.send("Network.enable")
    line.send("Network.emulateNetworkConditions", _LINE)
    answer = page.goto(address, wait_until="load")
    if answer is None or answer.status != 200:
        raise AssertionError(f"{address} answered {answer and answer.status}")
    seen: dict[str, Any] = page.evaluate(_MEASURE, _REST_MS)
    context.close()
    return seen


def main() -> None:
    sys.stdout.write(json.dumps(measure(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))) + "\n")


if __name__ == "__main__":
    main()
