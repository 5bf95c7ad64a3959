"""What a strict Content-Security-Policy, the budgets and the vendored files ask of every template and script."""

import gzip
import hashlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.core.templatetags.statuses import STATUSES
from apps.interfaces.web.shell import navigation

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "static"
PAGES = sorted(path for path in (ROOT / "templates").rglob("*.html") if "mail" not in path.parts)
COTTON = ROOT / "templates" / "cotton"
COMPONENTS = {
    ".".join(path.relative_to(COTTON).with_suffix("").parts).replace("_", "-"): path for path in COTTON.rglob("*.html")
}
OWN_SCRIPTS = sorted((STATIC / "js").glob("*.js"))
VENDOR = tomllib.loads((STATIC / "vendor" / "VENDOR.toml").read_text())
ICONS = set(re.findall(r'<symbol id="([^"]+)"', (STATIC / "icons.svg").read_text()))

BANNED_IN_PAGES = {
    "inline style": re.compile(r"""\sstyle\s*=\s*["']|<style[\s>]"""),
    "inline script": re.compile(r"<script(?![^>]*\ssrc=)[^>]*>"),
    "event attribute": re.compile(r"""\son[a-z]+\s*=\s*["']"""),
    "hx-on": re.compile(r"\shx-on[:=-]"),
    "javascript url or value": re.compile(r"""["'\s](?:js|javascript):"""),
    "trigger filter": re.compile(r"""hx-trigger(?::\w+)?\s*=\s*(?:"[^"]*\[|'[^']*\[)"""),
    "another origin": re.compile(r"""(?:src|href)\s*=\s*["'](?:https?:)?//(?!\{)"""),
}
BANNED_IN_SCRIPTS = re.compile(
    r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write|setAttribute\([\"']style"
)
KB = 1_000
BUDGET_CSS, BUDGET_JS, BUDGET_JS_CHART, BUDGET_FONTS = 20 * KB, 25 * KB, 55 * KB, 60 * KB
CHART_SCRIPTS = (STATIC / "js/charts.js", STATIC / "js/live.js")
EXPORTED = {"billing/traffic.html", "billing/usage.html", "billing/invoice.html"}
NO_DATA = {
    "adapters/playground.html": "a part of the table of prices",
    "help/_fields.html": "explains requests",
    "shell/confirmation.html": "asks before an action",
    "shell/overview.html": "the newest rows of a list",
}
SHELL_SCRIPTS = ("vendor/htmx-4.0.1.min.js", "vendor/hx-sse-4.0.1.min.js", "js/app.js")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_template_needs_no_exception_from_the_policy(path: Path) -> None:
    text = _without_comments(path.read_text())

    assert [name for name, pattern in BANNED_IN_PAGES.items() if pattern.search(text)] == []


@pytest.mark.parametrize("path", OWN_SCRIPTS, ids=lambda path: path.name)
def test_a_script_never_makes_code_or_markup_from_text(path: Path) -> None:
    assert BANNED_IN_SCRIPTS.findall(path.read_text()) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_components_exist_and_pass_only_declared_variables_unescaped(path: Path) -> None:
    """Cotton writes undeclared `:name` attributes into the page without escaping them."""
    for tag, attributes in re.findall(r"<c-([a-z.-]+)((?:\s[^<>]*?(?:\"[^\"]*\"[^<>]*?)*)?)/?>", path.read_text()):
        if tag in ("vars", "slot"):
            continue
        assert tag in COMPONENTS, f"<c-{tag}> has no template"
        declared = _declared(COMPONENTS[tag])
        bound = {name.replace("-", "_") for name in re.findall(r"\s:([a-z_-]+)=", attributes)}
        assert bound <= declared, f"<c-{tag}> does not declare {bound - declared}"


@pytest.mark.parametrize("entry", VENDOR["file"], ids=lambda entry: entry["name"])
def test_a_vendored_file_is_the_one_recorded(entry: dict[str, str]) -> None:
    assert hashlib.sha256((ROOT / entry["path"]).read_bytes()).hexdigest() == entry["sha256"]


def test_every_file_from_elsewhere_is_recorded_and_the_licences_lie_beside_it() -> None:
    here = [*(STATIC / "vendor").glob("*.js"), *(STATIC / "vendor").glob("*.css"), *(STATIC / "fonts").iterdir()]
    here += (ROOT / "tests" / "browser" / "vendor").glob("*.js")

    assert {str(path.relative_to(ROOT)) for path in here} == {entry["path"] for entry in VENDOR["file"]}
    assert {path.stem for path in (STATIC / "vendor" / "licences").iterdir()} == {"geist", "htmx", "lucide", "uplot"}


def test_the_icon_sprite_is_the_one_recorded() -> None:
    recorded = VENDOR["icons"]

    assert hashlib.sha256((ROOT / recorded["path"]).read_bytes()).hexdigest() == recorded["sha256"]
    assert set(recorded["names"]) == ICONS


def test_no_line_of_a_template_is_wider_than_the_formatter_makes_them() -> None:
    width = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["djangofmt"]["line-length"]
    texts = [path for path in (ROOT / "templates").rglob("*") if path.suffix in (".html", ".txt")]

    wide = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > width
    ]

    assert width == 120 and len(texts) > 200
    assert wide == []


def test_every_icon_named_anywhere_is_in_the_sprite() -> None:
    assert set(_icons_named()) <= ICONS


def test_every_table_is_also_a_file() -> None:
    """Its `csv` names the file, or its page has one with all rows: that of a list, or one in EXPORTED."""
    without = [
        str(path.relative_to(ROOT / "templates"))
        for path in PAGES
        if "styleguide" not in path.parts and "<c-data.list-head" not in path.read_text()
        for tag in re.findall(r"<c-data\.table((?:[^>\"]|\"[^\"]*\")*)>", path.read_text())
        if "csv=" not in tag
    ]

    assert sorted(set(without)) == sorted(EXPORTED | NO_DATA.keys())


def test_styles_and_scripts_stay_within_their_budgets() -> None:
    css = sum(_compressed(path) for path in (STATIC / "css").glob("*.css"))
    shell = sum(_compressed(STATIC / name) for name in SHELL_SCRIPTS)
    chart = shell + sum(map(_compressed, (STATIC / "vendor/uplot-1.6.32.iife.min.js", *CHART_SCRIPTS)))
    events = _compressed(STATIC / "vendor/hx-sse-4.0.1.min.js")  # the playground, which reads streams itself, has none
    pages = [shell + _compressed(STATIC / "js/upload.js"), shell - events + _compressed(STATIC / "js/playground.js")]
    fonts = sum(path.stat().st_size for path in (STATIC / "fonts").iterdir())

    assert css <= BUDGET_CSS
    assert max(pages) <= BUDGET_JS
    assert chart <= BUDGET_JS_CHART
    assert fonts <= BUDGET_FONTS


def test_the_base_template_links_every_layer_in_order() -> None:
    linked = re.findall(r"css/(\d\d-[a-z]+\.css)", (ROOT / "templates" / "layouts" / "base.html").read_text())

    assert linked == sorted(path.name for path in (STATIC / "css").glob("*.css"))


def test_themes_differ_in_colours_alone_and_widths_between_those_that_are_tried() -> None:
    """What `check_page` in tests/support/browser.py relies on: `light-dark()` takes nothing but colours."""
    styles = "".join(path.read_text() for path in (STATIC / "css").glob("*.css"))
    pages = [path.name for path in PAGES if re.search(r"\{[%{][^}]*\btheme\b", path.read_text())]
    breakpoints = {int(pixels) for pixels in re.findall(r"\((?:min|max)-width: (\d+)px\)", styles)}

    assert re.findall(r"\[data-theme[^{]*\{[^}]*\}|prefers-color-scheme", styles) == [
        '[data-theme="light"] { color-scheme: light; }',
        '[data-theme="dark"] { color-scheme: dark; }',
    ]
    # The attribute, the buttons with the choice, and the value that the switch sends.
    assert sorted(pages) == ["base.html", "profile.html", "theme_switch.html"]
    assert breakpoints and min(breakpoints) >= 390 and max(breakpoints) <= 1440


def _without_comments(text: str) -> str:
    return re.sub(r"\{% comment %\}.*?\{% endcomment %\}|\{#.*?#\}", "", text, flags=re.DOTALL)


def _declared(component: Path) -> set[str]:
    match = re.search(r"<c-vars((?:\s+[:a-z_-]+(?:=\"[^\"]*\")?)*)\s*/?>", component.read_text())
    return {name.replace("-", "_") for name in re.findall(r"\s:?([a-z_-]+)(?==|\s|$)", match[1])} if match else set()


def _icons_named() -> Iterator[str]:
    for path in PAGES:
        text = path.read_text()
        yield from re.findall(r'\{% icon "([a-z0-9-]+)"', text)
        yield from re.findall(r'<c-[a-z.-]+ [^>]*?\bicon(?:_end)?="([a-z0-9-]+)"', text)
    for place in (*navigation.MAIN, *navigation.ACCOUNT, *navigation.OPERATOR, *navigation.ACTIONS):
        yield place.icon
    yield from (status.icon for status in STATUSES.values() if status.icon)


def _compressed(path: Path) -> int:
    return len(gzip.compress(path.read_bytes(), 9))
