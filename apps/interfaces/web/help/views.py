"""The help inside the product: the repository's pages, a quickstart with the reader's own model, the API reference."""

from functools import cache
from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.templatetags.static import static
from django.utils.translation import get_language
from django.views.decorators.http import require_safe

from apps.accounts.models import Organization
from apps.accounts.roles import Permission
from apps.adapters.models import AdapterVersion
from apps.adapters.queries import list_versions
from apps.catalog.queries import list_base_models
from apps.interfaces.web.help.pages import PAGES, Audience, HelpPage, address_of, find_page, read_page
from apps.interfaces.web.help.reference import api_groups
from apps.interfaces.web.help.search import search
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view, public_view
from apps.interfaces.web.shell.code_samples import chat_samples, first_job_samples
from apps.interfaces.web.shell.first_job import SAMPLE
from apps.serving.models import Deployment

_MAX_WORDS = 80


@public_view
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    """List the pages by audience; `?q` searches them."""
    words = request.GET.get("q", "").strip()[:_MAX_WORDS]
    found = [(address_of(each.document.slug), each) for each in search(words)] if words else None
    return _render(request, "help/index.html", {"groups": list_by_audience(), "found": found, "q": words})


def list_by_audience() -> list[tuple[str, list[tuple[HelpPage, str]]]]:
    """Return the pages with their titles, by the audience whose name heads them."""
    listed = [each for each in Audience if each not in (Audience.START, Audience.DECISIONS)]  # they have other links
    return [
        (audience.value, [(page, read_page(page.slug).title) for page in PAGES if page.audience is audience])
        for audience in listed
    ]


@public_view
@require_safe
def page(request: HttpRequest, slug: str) -> HttpResponse:
    """Show one page of the repository."""
    shown = find_page(slug)
    if shown is None:
        raise Http404
    return _render(request, "help/page.html", {"page": shown, "rendered": read_page(slug)})


@require_safe
@organization_view(Permission.VIEW)
def quickstart(request: OrganizationRequest) -> HttpResponse:
    """Show code, ready to paste, that calls one of the reader's models and trains one."""
    base = list_base_models(only_installed=True).first()
    newest = _newest_served(request.organization)
    base_name = base.name if base else ""
    model = newest.model_name if newest else base_name
    context = {
        "model": model,
        "ask": chat_samples(model=model or "…", prompt="Where is my card?"),
        "train": first_job_samples(model=base_name or "…", sample_url=settings.PUBLIC_URL + static(SAMPLE)),
    }
    return _render(request, "help/quickstart.html", context)


def _newest_served(organization: Organization) -> AdapterVersion | None:
    """Return the newest version that answers or will once it is loaded."""
    deployed = Deployment.objects.for_organization(organization).filter(removed_at=None)
    return list_versions(organization=organization).filter(pk__in=deployed.values("adapter_version")).first()


@public_view
@require_safe
def reference(request: HttpRequest) -> HttpResponse:
    """Show every call of the API with its parameters, body and answers, from the OpenAPI document."""
    return _render(request, "help/reference.html", {"calls": calls_as_html(get_language())})


@cache
def calls_as_html(language: str) -> str:
    """Return the HTML of all calls. It is the same for every reader of a language."""
    return render_to_string("help/_calls.html", {"groups": api_groups()})


def _render(request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
    frame = "layouts/shell.html" if request.user.is_authenticated else "layouts/public.html"
    return render(request, template, context | {"help_frame": frame})
