"""The pages of the help: the files of the repository, their audience, and the product's pages that link to them."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path, PurePosixPath

from django.urls import reverse

from apps.interfaces.web.help.markdown import Rendered, render

_ROOT = Path(__file__).resolve().parents[4]
# Made from the code, not from a file of the repository.
QUICKSTART, REFERENCE = "quickstart", "reference"
_API_DOCUMENT = "docs/openapi.json"  # what pages of the repository link to for the reference


class Audience(StrEnum):
    START = "Start here"
    USERS = "For users"
    PROGRAMS = "Build with the API"
    COOKBOOK = "Cookbook"
    OPERATORS = "For operators"
    CONTRIBUTORS = "For contributors"
    DECISIONS = "Decisions"


@dataclass(frozen=True)
class HelpPage:
    """A page of the help. `views` are the prefixes of the views whose Help link opens it."""

    slug: str
    file: str
    summary: str
    audience: Audience
    views: tuple[str, ...] = ()


PAGES = (
    HelpPage("guides", "docs/guides.md", "Find the page for your task", Audience.START),
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
        ("web:job_", "web:quota_", "web:tracker_", "web:first_job"),
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
        ("web:key_", "web:batch_", "web:completion_"),
    ),
    HelpPage(
        "evals",
        "docs/evals.md",
        "Criteria for answers, runs that grade a model, their cost and limits",
        Audience.PROGRAMS,
        ("web:eval_",),
    ),
    HelpPage(
        "retraining",
        "docs/retraining.md",
        "A job repeated on a schedule or when data grows, and promoted if it is better",
        Audience.PROGRAMS,
        ("web:job_retraining",),
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
    HelpPage("first-adapter", "docs/cookbook/first-adapter.md", "A dozen rows, one job, one answer", Audience.COOKBOOK),
    HelpPage("evaluate", "docs/cookbook/evaluate.md", "Held-out rows, a grader, a verdict", Audience.COOKBOOK),
    HelpPage("batches", "docs/cookbook/batches.md", "One file in, one file out", Audience.COOKBOOK),
    HelpPage("receive-webhooks", "docs/cookbook/webhooks.md", "A receiver that verifies", Audience.COOKBOOK),
    HelpPage(
        "import-from-openai", "docs/cookbook/import-from-openai.md", "Files, jobs and model names", Audience.COOKBOOK
    ),
    HelpPage("model-as-code", "docs/cookbook/model-as-code.md", "Train and promote from your CI", Audience.COOKBOOK),
    HelpPage(
        "generated-clients",
        "docs/cookbook/generated-clients.md",
        "Typed clients for Python and TypeScript, from the OpenAPI document",
        Audience.COOKBOOK,
    ),
    HelpPage(
        "accounts",
        "docs/security/accounts.md",
        "Sign-up, second factors, roles, API keys, the audit log",
        Audience.OPERATORS,
        (
            "web:member_",
            "web:project_",
            "web:organization_",
            "web:audit",
            "staff:organization_",
            "staff:audit",
            "account_",
            "mfa_",
        ),
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
    HelpPage(
        "capacity",
        "docs/capacity.md",
        "Pools whose machines are started and released through Slurm or Kubernetes",
        Audience.OPERATORS,
    ),
    HelpPage("compose", "docs/operations/compose.md", "An installation on one machine with Docker", Audience.OPERATORS),
    HelpPage("slurm", "docs/operations/slurm.md", "An elastic pool on your Slurm cluster", Audience.OPERATORS),
    HelpPage(
        "kubernetes", "docs/operations/kubernetes.md", "The Helm chart: what it contains and needs", Audience.OPERATORS
    ),
    HelpPage(
        "monitoring",
        "docs/operations/monitoring.md",
        "Series for Prometheus, alerts and dashboards",
        Audience.OPERATORS,
    ),
    HelpPage(
        "backup", "docs/operations/backup.md", "Back everything up, and restore it after a loss", Audience.OPERATORS
    ),
    HelpPage("faults", "docs/operations/faults.md", "What was broken on purpose, and what held", Audience.OPERATORS),
    HelpPage("sizing", "docs/operations/sizing.md", "What is full first, and how much you need", Audience.OPERATORS),
    HelpPage(
        "regions",
        "docs/regions.md",
        "Keep the data of an organization in a region",
        Audience.OPERATORS,
        ("staff:region_",),
    ),
    HelpPage("security", "SECURITY.md", "How to report a vulnerability, and what is supported", Audience.OPERATORS),
    HelpPage("changelog", "CHANGELOG.md", "What's new in this version", Audience.OPERATORS),
    HelpPage("contributing", "CONTRIBUTING.md", "Set up, test, style, commits and review", Audience.CONTRIBUTORS),
    HelpPage("architecture", "docs/ARCHITECTURE.md", "Packages, processes, three journeys", Audience.CONTRIBUTORS),
    HelpPage("how-to-change", "docs/HOW_TO_CHANGE.md", "The files that a usual change touches", Audience.CONTRIBUTORS),
    HelpPage("words", "docs/CONTEXT.md", "One word for each thing", Audience.CONTRIBUTORS),
    HelpPage("states", "docs/states.md", "The legal changes of state", Audience.CONTRIBUTORS),
    *(
        HelpPage(f"decision-{path.name[:4]}", f"docs/adr/{path.name}", "A decision and its reasons", Audience.DECISIONS)
        for path in sorted((_ROOT / "docs/adr").glob("*.md"))
    ),
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
    return render_page(_BY_SLUG[slug], address=address_of)


def read_title(page: HelpPage) -> str:
    """Return the first heading of a page."""
    with (_ROOT / page.file).open() as lines:
        return next(line for line in lines if line.startswith("# ")).removeprefix("# ").strip()


def render_page(page: HelpPage, *, address: Callable[[str], str]) -> Rendered:
    """Return a page as HTML. `address` returns the link to another page for its slug."""
    folder = PurePosixPath(page.file).parent

    def resolve(target: str) -> str:
        if target.startswith(("http:", "https:", "#")):
            return target
        path, _, anchor = target.partition("#")
        file = _normal(folder / path)
        slug = REFERENCE if file == _API_DOCUMENT else _BY_FILE[file].slug if file in _BY_FILE else ""
        return address(slug) + (f"#{anchor}" if anchor else "") if slug else ""

    return render((_ROOT / page.file).read_text(), resolve=resolve)


def address_of(slug: str) -> str:
    """Return the address at which the product shows a page, the quickstart or the reference."""
    return reverse("web:help_page", args=[slug])


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
