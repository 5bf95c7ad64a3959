"""The list of all places in the product. The sidebar, the command palette and the `g` keys are built from it."""

from dataclasses import dataclass
from functools import cache

from django.conf import settings
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext

from apps.accounts.roles import Permission, has_permission
from apps.core.messages.translation import later
from apps.interfaces.web.help.pages import page_of_view
from apps.payments.stripe.gateway import is_configured


@dataclass(frozen=True, kw_only=True)
class Place:
    """A page of the main navigation. `views` are the prefixes of its view names.

    `is_payments`: shown only if this installation takes payments.
    """

    label: str
    icon: str
    url_name: str
    views: tuple[str, ...]
    go: str = ""
    live: bool = False
    is_payments: bool = False


@dataclass(frozen=True, kw_only=True)
class Action:
    """An action that the command palette offers to roles that may do it. `key` works outside of fields."""

    label: str
    icon: str
    url_name: str
    permission: Permission
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class NavigationLink:
    """A place or action as this request sees it."""

    label: str
    icon: str
    url: str
    current: bool = False
    go: str = ""
    key: str = ""
    live: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    label: str
    links: tuple[NavigationLink, ...]


MAIN = (
    Place(label=later("Overview"), icon="layout-dashboard", url_name="web:overview", views=("web:overview",), go="o"),
    Place(label=later("Datasets"), icon="database", url_name="web:dataset_list", views=("web:dataset_",), go="d"),
    Place(label=later("Fine-tunes"), icon="workflow", url_name="web:job_list", views=("web:job_",), go="f", live=True),
    Place(label=later("Adapters"), icon="boxes", url_name="web:adapter_list", views=("web:adapter_",), go="a"),
    Place(
        label=later("Playground"), icon="message-square", url_name="web:playground", views=("web:playground",), go="p"
    ),
    Place(label=later("Batches"), icon="layers", url_name="web:batch_list", views=("web:batch_",)),
    Place(label=later("Completions"), icon="inbox", url_name="web:completion_list", views=("web:completion_",)),
    Place(label=later("Evals"), icon="star", url_name="web:eval_list", views=("web:eval_",)),
)
HELP = Place(label=later("Help"), icon="book-open", url_name="web:help", views=("web:help", "web:status"), go="h")
STATUS = Place(label=later("Status"), icon="activity", url_name="web:status", views=())
ACCOUNT = (
    Place(label=later("Usage"), icon="chart-column", url_name="web:usage", views=("web:usage",), go="u"),
    Place(label=later("Billing"), icon="credit-card", url_name="web:billing", views=("web:billing",), is_payments=True),
    Place(label=later("API keys"), icon="key-round", url_name="web:key_list", views=("web:key_",), go="k"),
    Place(
        label=later("Members"),
        icon="users",
        url_name="web:member_list",
        views=("web:member_", "web:invitation_", "web:service_account_", "web:project_"),
        go="m",
    ),
    Place(label=later("Budgets"), icon="gauge", url_name="web:budget_list", views=("web:budget_",), go="b"),
    Place(label=later("Quotas"), icon="server", url_name="web:quota_list", views=("web:quota_",)),
    Place(
        label=later("Invoices"),
        icon="receipt",
        url_name="web:invoice_list",
        views=("web:invoice_", "web:price_", "web:charge_"),
        go="i",
    ),
    HELP,
)
OPERATOR = (
    Place(label=later("Installation"), icon="layout-dashboard", url_name="staff:home", views=("staff:home",)),
    Place(label=later("Pools"), icon="server", url_name="staff:pool_list", views=("staff:pool_", "staff:worker_")),
    Place(label=later("Replicas"), icon="activity", url_name="staff:replica_list", views=("staff:replica_",)),
    Place(
        label=later("Base models"), icon="brain-circuit", url_name="staff:base_model_list", views=("staff:base_model_",)
    ),
    Place(label=later("Prices"), icon="tag", url_name="staff:price_list", views=("staff:price_",)),
    Place(label=later("Payments"), icon="credit-card", url_name="staff:payment_list", views=("staff:payment_",)),
    Place(label=later("Quotas"), icon="gauge", url_name="staff:quota_list", views=("staff:quota_",)),
    Place(label=later("Jobs"), icon="list", url_name="staff:job_list", views=("staff:job_",)),
    Place(label=later("Books"), icon="receipt", url_name="staff:books", views=("staff:books", "staff:adjustment_")),
    Place(label=later("Margin"), icon="coins", url_name="staff:margin", views=("staff:margin",)),
    Place(label=later("Audit log"), icon="history", url_name="staff:audit", views=("staff:audit",)),
    Place(
        label=later("Organizations"),
        icon="building-2",
        url_name="staff:organization_list",
        views=("staff:organization_",),
    ),
)
ACTIONS = (
    Action(label=later("New fine-tune"), icon="plus", url_name="web:job_new", permission=Permission.JOB_WRITE, key="n"),
    Action(
        label=later("Upload a dataset"),
        icon="upload",
        url_name="web:dataset_upload",
        permission=Permission.DATASET_WRITE,
    ),
    Action(
        label=later("Create an API key"), icon="key-round", url_name="web:key_list", permission=Permission.KEY_MANAGE
    ),
    Action(
        label=later("Service accounts"), icon="users", url_name="web:service_account_list", permission=Permission.VIEW
    ),
    Action(label=later("Projects"), icon="layers", url_name="web:project_list", permission=Permission.VIEW),
    Action(
        label=later("Organization settings"),
        icon="settings",
        url_name="web:organization_settings",
        permission=Permission.VIEW,
    ),
    Action(label=later("Audit log"), icon="history", url_name="web:audit", permission=Permission.AUDIT_READ),
    Action(label=later("Prices"), icon="tag", url_name="web:price_list", permission=Permission.VIEW),
    Action(
        label=later("Experiment trackers"), icon="activity", url_name="web:tracker_list", permission=Permission.VIEW
    ),
    Action(label=later("Webhooks"), icon="activity", url_name="web:webhook_list", permission=Permission.WEBHOOK_MANAGE),
    Action(label=later("Estimates and actuals"), icon="gauge", url_name="web:accuracy", permission=Permission.VIEW),
    Action(label=later("Status"), icon="activity", url_name="web:status", permission=Permission.VIEW),
    Action(label=later("Your account"), icon="user", url_name="web:account", permission=Permission.VIEW),
)


def sections(request: HttpRequest) -> list[Section]:
    """Return the sidebar of this request, with the operator's part only for operators."""
    match = request.resolver_match
    view = match.view_name if match else ""
    listed: list[tuple[str, tuple[Place, ...]]] = [("", MAIN), (gettext("Account"), ACCOUNT)]
    if getattr(request.user, "is_operator", False):
        listed.append((gettext("Operator"), OPERATOR))
    return [Section(label=label, links=_links(places, view)) for label, places in listed]


def places_of_everybody() -> list[NavigationLink]:
    """Return the main places, the help and the status, without a reader: for pages of errors."""
    return [
        NavigationLink(label=place.label, icon=place.icon, url=url)
        for place in (*MAIN, HELP, STATUS)
        if (url := _url(place.url_name))
    ]


def actions(request: HttpRequest) -> list[NavigationLink]:
    """Return the actions of the reader's role in the current organization; none without an organization."""
    membership = getattr(request, "membership", None)
    if membership is None:
        return []
    return [
        NavigationLink(label=action.label, icon=action.icon, url=url, key=action.key)
        for action in ACTIONS
        if has_permission(membership.role, action.permission) and (url := _url(action.url_name))
    ]


def help_url(request: HttpRequest) -> str:
    """Return the address of the help about this request's page."""
    match = request.resolver_match
    page = page_of_view(match.view_name) if match else None
    return reverse("web:help_page", args=[page.slug]) if page else _url("web:help")


def _links(places: tuple[Place, ...], view: str) -> tuple[NavigationLink, ...]:
    return tuple(
        NavigationLink(
            label=place.label,
            icon=place.icon,
            url=url,
            current=view.startswith(place.views),
            go=place.go,
            live=place.live,
        )
        for place in places
        if (url := _url(place.url_name)) and (is_configured() or not place.is_payments)
    )


def _url(name: str) -> str:
    """Return the address of a named page; return "" if this process does not serve it (internal has no dashboard)."""
    return _url_in(settings.ROOT_URLCONF, name)


@cache  # each page asks for dozens
def _url_in(urlconf: str, name: str) -> str:
    try:
        return reverse(name, urlconf)
    except NoReverseMatch:
        return ""
