"""The first job: the sample file, trained with one click at the price that the button shows."""

import secrets
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import msgspec
from django.conf import settings
from django.contrib import messages
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext
from django.views.decorators.http import require_POST

from apps.accounts.models import Organization
from apps.accounts.roles import Permission
from apps.billing.queries import get_balance
from apps.catalog.models import BaseModel
from apps.catalog.queries import chat_renderer, list_base_models
from apps.contracts.chat import RowKind, parse_line_as, split_lines
from apps.contracts.hyperparameters import Method
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.database.tenancy import id_of
from apps.core.errors import DomainError
from apps.core.http.forms import domain_errors_shown
from apps.datasets.intake.versions import create_version
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.queries import list_versions
from apps.datasets.token_counts import Lengths, count_rows, measure_rows
from apps.finetuning.jobs.admission import require_maximum
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.quotes.options import PoolQuote, by_use
from apps.finetuning.quotes.queries import quote_counted
from apps.finetuning.recipes import completion
from apps.finetuning.recipes.training_data import Counted
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.current_project import project_of_new_work

SAMPLE = "samples/banking-questions.jsonl"
DATASET_NAME = "Sample: banking questions"
_SUFFIX = "banking-questions"
_MODELS_TRIED = 5
_USABLE = (DatasetVersionStatus.UPLOADED, DatasetVersionStatus.VALIDATING, DatasetVersionStatus.READY)


@dataclass(frozen=True, kw_only=True)
class FirstJob:
    """The job that the button starts: LoRA with the model's own recipe, on the cheapest pool that can start it."""

    model: BaseModel
    quote: PoolQuote
    rows: int
    balance_nano: int
    once: str = field(default_factory=lambda: secrets.token_urlsafe(18))

    @property
    def missing_nano(self) -> int:
        """Return the missing credit for the job's hold; return 0 if the balance covers it."""
        return max((self.quote.cap_nano or 0) - self.balance_nano, 0)


def find_first_job(*, organization: Organization) -> FirstJob | None:
    """Return the job with its quote; return None if no installed model can be trained on an open pool now."""
    balance_nano = get_balance(organization=organization).available_nano
    for model in list_base_models(only_installed=True)[:_MODELS_TRIED]:
        quotes = [quoted for quoted in _quotes(organization, model) if quoted.is_launchable and quoted.cap_nano]
        if quotes:
            best = min(quotes, key=by_use)
            rows = _lengths(model.pk, model.chat_template_sha256).rows
            return FirstJob(model=model, quote=best, rows=rows, balance_nano=balance_nano)
    return None


@require_POST
@organization_view(Permission.JOB_WRITE)
def train(request: OrganizationRequest) -> HttpResponse:
    """Store the sample file and start its job, at most once per form; the job waits until the file is checked."""
    once, cap = request.POST.get("once", "")[:60], request.POST.get("cap_nano", "")
    if not once or not cap.isdecimal() or len(cap) > 18:
        messages.error(request, gettext("Open the overview again and press the button there."))
        return redirect("web:overview")
    if get_balance(organization=request.organization).available_nano < int(cap):
        messages.error(request, gettext("Your balance does not cover this job. Get credit first."))
        return redirect("web:credit")
    with domain_errors_shown(request), transaction.atomic():  # a refused job leaves no file behind
        first = find_first_job(organization=request.organization)
        if first and first.model.name == request.POST.get("model"):
            require_maximum(cap_nano=first.quote.cap_nano or 0, shown_nano=int(cap))
        project_id = project_of_new_work(request).pk
        asked = JobRequest(
            base_model=request.POST.get("model", ""),
            training_file=_sample_version(request.organization, project_id, by=request.membership.user_id).pk,
            shown_max_nano=int(cap),
            suffix=_SUFFIX,
            project=project_id,
            idempotency_key=f"first-job:{once}",
        )
        job = create_job(organization=request.organization, request=asked, by=request.membership.user_id, now=db_now())
        return redirect("web:job_detail", job_id=job.pk)
    return redirect("web:overview")


def _sample_version(organization: Organization, project_id: str, *, by: str) -> DatasetVersion:
    """Return the project's own copy of the sample file; store it if there is none. Raises StorageFull."""
    lock(f"sample file:{organization.pk}")
    kept = list_versions(organization=organization).filter(
        dataset__project=project_id, dataset__name=DATASET_NAME, status__in=_USABLE
    )
    return kept.order_by("-number").first() or create_version(
        organization=organization,
        filename=Path(SAMPLE).name,
        purpose="fine-tune",
        chunks=iter([_path().read_bytes()]),
        by=by,
        now=db_now(),
        dataset_name=DATASET_NAME,
        project=project_id,
    )


def _quotes(organization: Organization, model: BaseModel) -> list[PoolQuote]:
    """Return the quotes of the sample for a model, as if the organization had uploaded it."""
    try:
        lengths = _lengths(model.pk, model.chat_template_sha256)
        data = completion.DataFacts(rows=lengths.rows, longest_row_tokens=lengths.longest_row_tokens)
        recipe = completion.choose(base_model=model, method=Method.LORA, asked={}, data=data).hyperparameters
        version = DatasetVersion(organization_id=id_of(organization), kind=RowKind.CHAT, rows=lengths.rows)
        counts = msgspec.to_builtins(lengths) | {"organization_id": id_of(organization)}
        del counts["rows"]
        count = TokenCount(version=version, base_model=model, **counts)
        counted = Counted(version=version, count=count)
        now = db_now()
        return quote_counted(base_model=model, counted=counted, recipes=[recipe], now=now, with_ways=False)[0]
    except DomainError:
        return []  # the wizard shows why


@lru_cache(maxsize=32)
def _lengths(model_id: str, chat_template_sha256: str) -> Lengths:
    """Return the token counts of the sample under a model's template.

    The hash is part of the cache key, so a new template is counted anew.
    """
    model = list_base_models(only_installed=True).get(pk=model_id)
    lines = split_lines(iter([_path().read_bytes()]))
    rows = (parse_line_as(line, RowKind.CHAT) for line in lines)
    return count_rows(measure_rows(chat_renderer(base_model=model), rows), longest_limit=model.context_length)


def _path() -> Path:
    return Path(settings.STATICFILES_DIRS[0]) / SAMPLE
