"""What the command palette finds: the organization's own objects by name and id, and for operators organizations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from apps.accounts.models import Membership, Organization
from apps.accounts.queries import list_keys
from apps.accounts.roles import Permission, has_permission
from apps.adapters.queries import list_versions as list_adapter_versions
from apps.catalog.queries import list_base_models
from apps.core.tenancy import system
from apps.datasets.queries import list_versions as list_dataset_versions
from apps.finetuning.queries import list_jobs, list_pools
from apps.serving.models import Alias
from apps.web.access import person_view
from apps.web.jobs import title_of
from apps.web.wizard_plan import Choices

MIN_CHARACTERS = 2
_MAX_CHARACTERS = 80
_MAX_WORDS = 5
_SHOWN = 5  # of each kind


@dataclass(frozen=True)
class Hit:
    label: str
    detail: str
    url: str


@dataclass(frozen=True)
class Kind:
    """One kind of object: its rows, the fields to look in, and how a row is shown."""

    label: str
    icon: str
    rows: QuerySet
    fields: tuple[str, ...]
    show: Callable[..., Hit]

    def find(self, words: list[str]) -> list[Hit]:
        """Return the first rows in which each word stands somewhere, in the order of `rows`."""
        each = (reduce(or_, (Q(**{f"{field}__icontains": word}) for field in self.fields)) for word in words)
        found: QuerySet[Model] = self.rows.filter(reduce(and_, each))[:_SHOWN]
        return [self.show(row) for row in found]


@never_cache
@require_safe
@person_view
def show(request: HttpRequest) -> HttpResponse:
    """Answer the palette with the groups that match `q`; nothing below `MIN_CHARACTERS`."""
    text = request.GET.get("q", "").strip()[:_MAX_CHARACTERS]
    words = text.split()[:_MAX_WORDS] if len(text) >= MIN_CHARACTERS else []
    groups = list(_groups(request, words)) if words else []
    return render(request, "search/results.html", {"groups": groups})


def _groups(request: HttpRequest, words: list[str]) -> Iterator[tuple[Kind, list[Hit]]]:
    membership: Membership | None = getattr(request, "membership", None)
    if membership is not None and not membership.organization.suspended_at:
        yield from _found(_kinds(membership), words)
    if getattr(request.user, "is_operator", False):
        with system():
            yield from _found(_operator_kinds(), words)


def _found(kinds: list[Kind], words: list[str]) -> list[tuple[Kind, list[Hit]]]:
    return [(kind, hits) for kind in kinds if (hits := kind.find(words))]


def _kinds(membership: Membership) -> list[Kind]:
    """Return what a member of this role can open."""
    organization = membership.organization
    aliases = Alias.objects.for_organization(organization).order_by("name", "id")
    kinds = [
        Kind(
            "Datasets",
            "database",
            list_dataset_versions(organization=organization).defer("line_offsets", "errors", "layout"),
            ("dataset__name", "filename", "id"),
            lambda row: Hit(row.dataset.name, f"version {row.number}, {row.filename}", _url("dataset_detail", row.pk)),
        ),
        Kind(
            "Fine-tunes",
            "workflow",
            list_jobs(organization=organization),
            ("suffix", "training_file__dataset__name", "base_model__display_name", "id"),
            lambda row: Hit(title_of(row), str(row.pk), _url("job_detail", row.pk)),
        ),
        Kind(
            "Adapters",
            "boxes",
            list_adapter_versions(organization=organization),
            ("adapter__name", "model_name", "id"),
            lambda row: Hit(row.adapter.name, row.model_name, _url("adapter_detail", row.pk)),
        ),
        Kind(
            "Aliases",
            "tag",
            aliases,
            ("name", "model_name"),
            lambda row: Hit(row.name, row.model_name, _url("adapter_detail", row.version_id)),
        ),
        Kind(
            "API keys",
            "key-round",
            list_keys(organization=organization),
            ("name", "prefix", "id"),
            lambda row: Hit(row.name, f"{row.prefix}…", _url("key_list")),
        ),
    ]
    return [*kinds, _base_models()] if has_permission(membership.role, Permission.JOB_WRITE) else kinds


def _base_models() -> Kind:
    return Kind(
        "Fine-tune a base model",
        "brain-circuit",
        list_base_models(),
        ("display_name", "name", "repo"),
        lambda row: Hit(
            row.display_name,
            row.name if row.is_installed else "not installed, estimate only",
            Choices({}).url(model=row.name),
        ),
    )


def _operator_kinds() -> list[Kind]:
    return [
        Kind(
            "Organizations",
            "building-2",
            Organization.objects.order_by("name", "id"),
            ("name", "slug", "id"),
            lambda row: Hit(row.name, str(row.pk), f"{reverse('staff:organization_list')}#{row.pk}"),
        ),
        Kind(
            "GPU pools",
            "server",
            list_pools(),
            ("name", "gpu_type__name", "id"),
            lambda row: Hit(row.name, row.gpu_type.name, reverse("staff:pool_detail", args=[row.pk])),
        ),
    ]


def _url(name: str, *args: str) -> str:
    return reverse(f"web:{name}", args=args)
