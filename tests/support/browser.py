"""What browser tests share: how a page is judged and how a test waits for it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from playwright.sync_api import Page, Route, TimeoutError, expect

from scripts.installation.clients import find_browser
from tests.support.waiting import wait_until

WIDTHS = (1440, 390, 320)
AXE = (Path(__file__).parents[1] / "browser" / "vendor" / "axe-4.14.1.min.js").read_text()
AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# Of the rules with these tags, those that read colours.
COLOUR_RULES = ["color-contrast", "link-in-text-block"]

# Two frames. On a busy machine the first one can take longer than a second, and what observes a size is told in it.
# A page that draws none at all has nothing to wait for.
DRAWN = """() => new Promise((done) => {
  setTimeout(done, 10_000);
  requestAnimationFrame(() => requestAnimationFrame(done));
})"""
_FITS = "() => document.documentElement.scrollWidth <= document.documentElement.clientWidth"
_WIDE = """() => [...document.querySelectorAll("body *")]
  .filter((each) => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .slice(0, 8).map((each) => `${each.tagName}#${each.id}.${each.className}`)"""
# However short, a transition takes a frame, and a busy machine draws one late.
_END_TRANSITIONS = """() => document.getAnimations()
  .filter((each) => each instanceof CSSTransition).forEach((each) => each.finish())"""
_SWITCH_THEME = """() => {
  const still = new CSSStyleSheet();
  still.replaceSync("*, ::before, ::after { transition-property: none !important }");
  document.adoptedStyleSheets = [still];
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  document.dispatchEvent(new CustomEvent("themechange"));
}"""


@pytest.fixture(scope="session")
def browser_type_launch_args() -> dict[str, Any]:
    """The system's browser, for pytest-playwright."""
    path = find_browser()
    if path is None:
        pytest.fail("Chromium is missing. Install it: apt-get install -y chromium-headless-shell", pytrace=False)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    # All pages are of one site that we trust: none gets a process of its own, and none is started in reserve.
    arguments += ["--renderer-process-limit=1", "--disable-site-isolation-trials"]
    # No page lives long enough to gain from optimized code: axe took a fifth more processor time with it.
    arguments += ["--js-flags=--no-opt"]
    return {"executable_path": path, "args": arguments}


def find_violations(page: Page, rules: Sequence[str] = AXE_TAGS) -> list[str]:
    """Return what axe holds against the page as it stands, one line per rule."""
    expect(page.locator(".htmx-request, [data-state=stale]")).to_have_count(0)  # what waits for an answer is dimmed
    page.evaluate(_END_TRANSITIONS)
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE)
    # axe describes what passed in full only when asked: most of its time and of the answer.
    found = page.evaluate(
        "(rules) => axe.run({runOnly: rules, resultTypes: ['violations']}).then((found) => found.violations)", rules
    )
    return [f"{rule['id']}: {rule['help']}: {[node['html'][:160] for node in rule['nodes'][:3]]}" for rule in found]


def check_page(page: Page, widths: Sequence[int], *, height: int = 900, read_at: Sequence[int] | None = None) -> None:
    """Assert that the page fits each width, and that it is accessible at `read_at` (all, by default) in both themes.

    What a width shows, hides and moves follows from the breakpoints, and a theme changes colours and nothing else
    (tests/guards/test_frontend.py holds the style sheets to both). All breakpoints lie between the widest and the
    narrowest width: at these two all rules run, at the widest in the theme that the page was opened in, at the
    narrowest in the other one. `make nightly` runs the rules that read colours in both themes at both.
    """
    is_thorough = hypothesis_settings.get_current_profile_name() == "thorough"
    read_at = read_at or widths
    present = (page.viewport_size or {"width": 0})["width"]
    for width in sorted(widths, key=lambda width: abs(width - present)):  # what is drawn at this width comes first
        page.set_viewport_size({"width": width, "height": height})
        seen = [find_overflow(page)]
        is_widest, is_narrowest = width == max(read_at), width == min(read_at)
        reads_all_here = is_widest or (is_thorough and is_narrowest)
        if reads_all_here:
            seen += find_violations(page)
        if is_narrowest or (is_thorough and is_widest):
            page.evaluate(_SWITCH_THEME)
            seen += find_violations(page, COLOUR_RULES if reads_all_here else AXE_TAGS)
            page.evaluate(_SWITCH_THEME)
        assert seen == [0], f"{page.url} at {width} px: {seen}; wider than the window: {page.evaluate(_WIDE)}"


def find_overflow(page: Page) -> int:
    """Return by how many pixels the page stays wider than the window (WCAG 1.4.10: none, down to 320)."""
    page.evaluate(DRAWN)  # what follows a resize by script has followed, unless the machine drew no frame in time
    with suppress(TimeoutError):
        page.wait_for_function(_FITS, polling=100, timeout=20_000)
    return page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")


def wait_on(page: Page, is_true: Callable[[], bool]) -> None:
    """Wait while the page's events are handled."""

    def happened() -> bool:
        page.wait_for_timeout(50)
        return is_true()

    wait_until(happened, seconds=60)


def hold_first(page: Page, url: str, *, target: str, count: int = 1) -> list[Route]:
    """Hold the first `count` requests that htmx sends for `target`, and return where they will be found."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        if len(held) >= count or route.request.headers.get("hx-target") != target:
            route.continue_()
        else:
            held.append(route)

    page.route(url, hold)
    return held
