"""Search for the command palette in an organization: datasets, jobs, adapters, aliases, keys and base models."""

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
from apps.core.database.search import Hit, HitKind, render_hits
from apps.datasets.queries import list_versions as list_dataset_versions
from apps.finetuning.queries import list_jobs
from apps.interfaces.web.jobs.views import title_of
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.wizard.draft import Draft
from apps.serving.models import Alias


@never_cache
@require_safe
@organization_view(Permission.VIEW)
def show(request: OrganizationRequest) -> HttpResponse:
    return render_hits(request, _kinds(request.membership), prefix="found")


def _kinds(membership: Membership) -> list[HitKind]:
    """Return the kinds that a member of this role can open."""
    organization = membership.organization
    aliases = Alias.objects.for_organization(organization).order_by("name", "id")
    kinds = [
        HitKind(
            "Datasets",
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
            "Fine-tunes",
            "workflow",
            list_jobs(organization=organization),
            ("suffix", "training_file__dataset__name", "base_model__display_name", "id"),
            lambda row: Hit(title_of(row), str(row.pk), _url("job_detail", row.pk)),
        ),
        HitKind(
            "Adapters",
            "boxes",
            list_adapter_versions(organization=organization),
            ("adapter__name", "model_name", "id"),
            lambda row: Hit(row.adapter.name, row.model_name, _url("adapter_detail", row.pk)),
        ),
        HitKind(
            "Aliases",
            "tag",
            aliases,
            ("name", "model_name"),
            lambda row: Hit(row.name, row.model_name, _url("adapter_detail", row.version_id)),
        ),
        HitKind(
            "API keys",
            "key-round",
            list_keys(organization=organization),
            ("name", "prefix", "id"),
            lambda row: Hit(row.name, f"{row.prefix}…", f"{_url('key_list')}?q={row.pk}"),
        ),
    ]
    return [*kinds, _base_models()] if has_permission(membership.role, Permission.JOB_WRITE) else kinds


def _base_models() -> HitKind:
    return HitKind(
        "Fine-tune a base model",
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
