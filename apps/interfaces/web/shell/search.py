"""Search for the command palette: an organization's objects, base models, and the pages of the help."""

from dataclasses import dataclass

from django.http import HttpResponse
from django.urls import reverse
from django.utils.translation import gettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from apps.accounts.models import Membership
from apps.accounts.queries import list_keys
from apps.accounts.roles import Permission, has_permission
from apps.adapters.queries import list_versions as list_adapter_versions
from apps.catalog.queries import list_base_models
from apps.core.database.search import SHOWN, Hit, HitKind, Searched, render_hits
from apps.core.messages.translation import later
from apps.datasets.queries import list_versions as list_dataset_versions
from apps.finetuning.queries import list_jobs
from apps.interfaces.web.help.pages import address_of
from apps.interfaces.web.help.search import find_titles
from apps.interfaces.web.jobs.views import title_of
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.wizard.draft import Draft
from apps.serving.aliases import list_aliases


@never_cache
@require_safe
@organization_view(Permission.VIEW)
def show(request: OrganizationRequest) -> HttpResponse:
    return render_hits(request, _kinds(request.membership), prefix="found")


@dataclass(frozen=True)
class _Help:
    """The pages of the help, by title and summary."""

    label: str = later("Help")
    icon: str = "book-open"

    def find(self, words: list[str]) -> list[Hit]:
        return [Hit(title, summary, address_of(slug)) for slug, title, summary in find_titles(words)[:SHOWN]]


def _kinds(membership: Membership) -> list[Searched]:
    """Return the kinds that a member of this role can open."""
    organization = membership.organization
    aliases = list_aliases(organization=organization).order_by("name", "id")
    kinds: list[Searched] = [
        HitKind(
            later("Datasets"),
            "database",
            list_dataset_versions(organization=organization).defer("line_offsets", "errors", "layout"),
            ("dataset__name", "filename", "id"),
            lambda row: Hit(
                row.dataset.name,
                gettext("version %(number)s, %(filename)s") % {"number": row.number, "filename": row.filename},
                _url("dataset_detail", row.pk),
            ),
        ),
        HitKind(
            later("Fine-tunes"),
            "workflow",
            list_jobs(organization=organization),
            ("suffix", "training_file__dataset__name", "base_model__display_name", "id"),
            lambda row: Hit(title_of(row), str(row.pk), _url("job_detail", row.pk)),
        ),
        HitKind(
            later("Adapters"),
            "boxes",
            list_adapter_versions(organization=organization),
            ("adapter__name", "model_name", "id"),
            lambda row: Hit(row.adapter.name, row.model_name, _url("adapter_detail", row.pk)),
        ),
        HitKind(
            later("Aliases"),
            "tag",
            aliases,
            ("name", "model_name"),
            lambda row: Hit(row.name, row.model_name, _url("adapter_detail", row.version_id)),
        ),
        HitKind(
            later("API keys"),
            "key-round",
            list_keys(organization=organization),
            ("name", "prefix", "id"),
            lambda row: Hit(row.name, f"{row.prefix}…", f"{_url('key_list')}?q={row.pk}"),
        ),
    ]
    if has_permission(membership.role, Permission.JOB_WRITE):
        kinds.append(_base_models())
    return [*kinds, _Help()]


def _base_models() -> HitKind:
    return HitKind(
        later("Fine-tune a base model"),
        "brain-circuit",
        list_base_models(),
        ("display_name", "name", "repo"),
        lambda row: Hit(
            row.display_name,
            row.name if row.is_installed else gettext("not installed, estimate only"),
            Draft({}).url(model=row.name),
        ),
    )


def _url(name: str, *args: str) -> str:
    return reverse(f"web:{name}", args=args)
