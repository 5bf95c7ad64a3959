"""The pages of the help: the files of the repository, their readers, and the pages of the product that open them."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path, PurePosixPath

from django.urls import reverse

from apps.interfaces.web.help.markdown import Rendered, render

_ROOT = Path(__file__).resolve().parents[4]


class Audience(StrEnum):
    USERS = "For users"
    PROGRAMS = "Build with the API"
    OPERATORS = "For operators"


@dataclass(frozen=True)
class HelpPage:
    """A page of the help. `views` are the prefixes of the views whose Help link opens it."""

    slug: str
    file: str
    summary: str
    audience: Audience
    views: tuple[str, ...] = ()


PAGES = (
    HelpPage(
        "datasets",
        "docs/datasets.md",
        "Formats, limits, checks, and repairing bad rows",
        Audience.USERS,
        ("web:dataset_",),
    ),
    HelpPage(
        "models",
        "docs/models.md",
        "Families you can train, the layers of an adapter, and how the result is served",
        Audience.USERS,
        ("staff:base_model",),
    ),
    HelpPage(
        "training",
        "docs/training.md",
        "Methods, recipes, checks before the first billed second, pausing and resuming",
        Audience.USERS,
        ("web:job_", "web:tracker_", "web:first_job"),
    ),
    HelpPage(
        "estimates",
        "docs/estimates.md",
        "How memory, time and cost are calculated, and how far off they were",
        Audience.USERS,
        ("web:accuracy",),
    ),
    HelpPage(
        "after-training",
        "docs/after-training.md",
        "Evaluation, certificates, files and exports",
        Audience.USERS,
        ("web:adapter_", "web:checkpoint_"),
    ),
    HelpPage(
        "serving",
        "docs/serving.md",
        "Deployments, aliases, cold starts, replicas",
        Audience.USERS,
        ("web:playground", "web:alias_", "staff:replica_"),
    ),
    HelpPage(
        "billing",
        "docs/billing.md",
        "Credit, what is charged and when, budgets and invoices",
        Audience.USERS,
        (
            "web:credit",
            "web:usage",
            "web:invoice_",
            "web:price_",
            "web:charge_",
            "web:budget_",
            "staff:books",
            "staff:margin",
            "staff:adjustment_",
            "staff:price_",
        ),
    ),
    HelpPage(
        "inference",
        "docs/gateway.md",
        "Chat, completions, responses: OpenAI's API, its limits and errors",
        Audience.PROGRAMS,
        ("web:key_", "web:batch_"),
    ),
    HelpPage(
        "errors",
        "docs/errors.md",
        "Each code with its status, meaning and fix",
        Audience.PROGRAMS,
    ),
    HelpPage(
        "webhooks",
        "docs/webhooks.md",
        "Signed events for your programs and Slack, and how to verify them",
        Audience.PROGRAMS,
        ("web:webhook_",),
    ),
    HelpPage(
        "command-line",
        "docs/cli.md",
        "Files, jobs, models and chat from a terminal or a script",
        Audience.PROGRAMS,
    ),
    HelpPage(
        "migrating",
        "docs/migrating.md",
        "From OpenAI and other tools, old model names, and a model as code",
        Audience.PROGRAMS,
    ),
    HelpPage(
        "accounts",
        "docs/security/accounts.md",
        "Sign-up, second factors, roles, API keys, the audit log",
        Audience.OPERATORS,
        ("web:member_", "web:organization_", "web:audit", "staff:organization_", "staff:audit", "account_", "mfa_"),
    ),
    HelpPage(
        "limits",
        "docs/limits.md",
        "Fair use: what is limited, at which entrance",
        Audience.OPERATORS,
        ("staff:quota_",),
    ),
    HelpPage(
        "payments",
        "docs/payments.md",
        "Cards through Stripe: top-ups, auto-recharge, refunds and disputes",
        Audience.OPERATORS,
        ("web:billing", "staff:payment_"),
    ),
    HelpPage(
        "threat-model",
        "docs/security/threat-model.md",
        "The worst that each kind of machine can do, and what limits it",
        Audience.OPERATORS,
        ("staff:pool_", "staff:worker_"),
    ),
    HelpPage("changelog", "CHANGELOG.md", "What's new in this version", Audience.OPERATORS),
)
_BY_SLUG = {page.slug: page for page in PAGES}
_BY_FILE = {page.file: page for page in PAGES}


def find_page(slug: str) -> HelpPage | None:
    return _BY_SLUG.get(slug)


def page_of_view(view_name: str) -> HelpPage | None:
    """Return the page that explains a view; the longest prefix decides."""
    fitting = [(len(prefix), page.slug) for page in PAGES for prefix in page.views if view_name.startswith(prefix)]
    return _BY_SLUG[max(fitting)[1]] if fitting else None


@cache
def read_page(slug: str) -> Rendered:
    """Return a page as HTML. It is read once in each process, because files change with releases only."""
    page = _BY_SLUG[slug]
    folder = PurePosixPath(page.file).parent
    return render((_ROOT / page.file).read_text(), resolve=lambda target: _address(folder, target))


def search(words: str) -> Iterator[tuple[HelpPage, Rendered]]:
    """Yield the pages that contain every word, those with all of them in the title first."""
    wanted = words.lower().split()
    found = []
    for page in PAGES:
        rendered = read_page(page.slug)
        title = f"{rendered.title} {page.summary} {' '.join(each.title for each in rendered.sections)}".lower()
        if all(word in title or word in rendered.text.lower() for word in wanted):
            found.append((not all(word in title for word in wanted), page, rendered))
    for _, page, rendered in sorted(found, key=lambda each: each[0]):
        yield page, rendered


def _address(folder: PurePosixPath, target: str) -> str:
    """Return where a link of a page leads; "" for a file that is no page of the help."""
    if target.startswith(("http:", "https:", "#")):
        return target
    path, _, anchor = target.partition("#")
    page = _BY_FILE.get(_normal(folder / path))
    if page is None:
        return ""
    return reverse("web:help_page", args=[page.slug]) + (f"#{anchor}" if anchor else "")


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
