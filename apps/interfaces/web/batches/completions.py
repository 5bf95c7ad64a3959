"""Stored completions: the list, the page of one, deletion, and datasets made of them."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from django import forms
from django.conf import settings
from django.contrib import messages
from django.db.models import Q, QuerySet, TextField
from django.db.models.functions import Cast, Now
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts.models import Project
from apps.accounts.queries import name_of_actor
from apps.accounts.roles import Permission, has_permission
from apps.batches.completions import operations, queries
from apps.batches.completions.models import StoredCompletion
from apps.core.database.clock import db_now
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.core.objects.downloads import download_csv
from apps.interfaces.web.shell.access import OrganizationRequest, may_write, organization_view
from apps.interfaces.web.shell.current_project import find_current_project, of_project, project_of_new_work
from apps.interfaces.web.shell.listing import NEWEST_FIRST, Filter, Listing, render_list

_LIST = Listing[StoredCompletion](
    name=later("stored completions"),
    hint=later('Model, ID, name=value or name="two words"'),
    url_name="web:completion_list",
    export_url_name="web:completion_export",
    searched=("model_name", "id", "metadata_text"),
    pairs="metadata",
    filters={
        "since": Filter(
            later("Created"),
            {
                "": (later("All"), Q()),
                "day": (later("Last 24 hours"), Q(created_at__gte=Now() - datetime.timedelta(days=1))),
                "week": (later("Last 7 days"), Q(created_at__gte=Now() - datetime.timedelta(days=7))),
            },
        )
    },
    orders={**NEWEST_FIRST, "size": (later("Largest first"), ("-bytes", "-id"))},
)
_EXPORTED = ("id", "model", "created_at", "metadata", "bytes", "question", "answer")
_MOST_CHARACTERS, _MOST_MESSAGES = 20_000, 100  # of a message, and of a completion, that a page shows
_SETTINGS = ("temperature", "top_p", "max_completion_tokens", "max_tokens", "seed", "n", "stop", "response_format")


@dataclass(frozen=True, kw_only=True)
class ShownMessage:
    """A message as text; `is_cut` if it is longer than a page shows."""

    role: str
    text: str
    is_cut: bool


class CompletionDatasetForm(forms.Form):
    name = forms.CharField(
        max_length=120,
        label=later("Name of the dataset"),
        help_text=later("A dataset of this name gets a new version."),
    )


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    return _page(request, CompletionDatasetForm())


@require_POST
@organization_view(Permission.DATASET_WRITE)
def make_dataset(request: OrganizationRequest) -> HttpResponse:
    """Make a dataset of the newest completions that the address asks for."""
    form = CompletionDatasetForm(request.POST)
    if form.is_valid():
        with domain_errors_on(form):
            listed = _listed(request, find_current_project(request))
            version = operations.create_dataset(
                organization=request.organization,
                name=form.cleaned_data["name"],
                by=request.membership.user_id,
                now=db_now(),
                among=_list_of(request).chosen(request, listed),
                project=project_of_new_work(request).pk,
            )
            messages.success(request, gettext("The dataset is created. Its rows are being checked."))
            return redirect("web:dataset_detail", file_id=version.pk)
    return _page(request, form, status=422)


def _page(request: OrganizationRequest, form: CompletionDatasetForm, status: int = 200) -> HttpResponse:
    project = find_current_project(request)
    page = _list_of(request).page(request, _listed(request, project).defer("request", "answer"))
    questions = queries.last_questions(completions=page.rows)
    context = {
        "rows": [
            {"completion": row, "question": questions.get(row.pk, ""), "metadata": list(row.metadata.items())}
            for row in page.rows
        ],
        "project": project,
        "form": form,
        "dataset_url": page.listing.address(page.asked, of="web:completion_dataset"),
        "kept_days": settings.STORED_COMPLETION_DAYS,
        "most_rows": operations.MAX_ROWS,
        "may_delete": has_permission(request.membership.role, Permission.INFERENCE),
        "may_make": has_permission(request.membership.role, Permission.DATASET_WRITE),
    }
    return render_list(request, "batches/completions.html", page, context, status=status)


def _list_of(request: OrganizationRequest) -> Listing[StoredCompletion]:
    """Return the list with a filter by model: those with completions, and the one that the address names."""
    asked = request.GET.get("model", "").replace("\x00", "")
    names = filter(None, dict.fromkeys([*queries.list_model_names(organization=request.organization), asked]))
    models = {"": (gettext("All models"), Q())} | {name: (name, Q(model_name=name)) for name in names}
    return replace(_LIST, filters={**_LIST.filters, "model": Filter(gettext("Model"), models)})


def _listed(request: OrganizationRequest, project: Project | None) -> QuerySet[StoredCompletion]:
    rows = of_project(project, queries.list_completions(organization=request.organization))
    return rows.alias(metadata_text=Cast("metadata", TextField()))


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    """Send the first completions of the list as a CSV file, with question and answer."""
    found = _list_of(request).chosen(request, _listed(request, find_current_project(request)))
    rows = [
        (
            row.pk, row.model_name, row.created_at.isoformat(), msgspec.json.encode(row.metadata).decode(), row.bytes,
            question, answer,
        )
        for row, question, answer in queries.read_table(completions=found)
    ]  # fmt: skip
    return download_csv(request, _EXPORTED, rows, filename="stored-completions.csv")


@require_safe
@organization_view(Permission.VIEW)
def detail(request: OrganizationRequest, completion_id: str) -> HttpResponse:
    completion = queries.get_completion(organization=request.organization, id=completion_id)
    sent, answer = queries.read_request(completion), queries.read_answer(completion)
    conversation = sent.get("messages") or []
    context = {
        "completion": completion,
        "owner": name_of_actor(organization=request.organization, actor=completion.key_id),
        "messages_shown": [_shown(message) for message in conversation[-_MOST_MESSAGES:]],
        "left_out": max(len(conversation) - _MOST_MESSAGES, 0),
        "answers": [_shown(choice["message"]) for choice in answer.get("choices") or []][:_MOST_MESSAGES],
        "metadata": list(completion.metadata.items()),
        "usage": answer.get("usage") or {},
        "settings": [(name, sent[name]) for name in _SETTINGS if sent.get(name) is not None],
        "tools": msgspec.json.format(msgspec.json.encode(sent["tools"]), indent=2).decode()[:_MOST_CHARACTERS]
        if sent.get("tools")
        else "",
        "may_delete": may_write(request, Permission.INFERENCE, completion.project_id),
    }
    return render(request, "batches/completion.html", context)


def _shown(message: Mapping[str, object]) -> ShownMessage:
    text = queries.text_of(message)
    if calls := message.get("tool_calls"):
        text = "\n".join(filter(None, (text, msgspec.json.encode(calls).decode())))
    role = str(message.get("role", "assistant"))
    return ShownMessage(role=role, text=text[:_MOST_CHARACTERS], is_cut=len(text) > _MOST_CHARACTERS)


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.INFERENCE)
def delete(request: OrganizationRequest) -> HttpResponse:
    """Delete one or several completions, after the user typed the id or the number of them."""
    return confirm(request, _DELETE)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    effect = gettext("The request and its answer are deleted. Datasets and evals made of them stay.")
    found = queries.list_completions(organization=request.organization).filter(pk__in=ids)
    return [AffectedRow(row.pk, row.pk, effect) for row in found.defer("request", "answer")]


def _delete(request: OrganizationRequest, completion_id: str) -> None:
    completion: StoredCompletion = queries.get_completion(organization=request.organization, id=completion_id)
    operations.delete_completion(completion=completion, by=request.membership.user_id, now=db_now())


_DELETE = ConfirmedAction[OrganizationRequest](
    parameter="completion",
    verb=later("Delete"),
    nouns=(later("stored completion"), later("stored completions")),
    warning=later("A deleted completion cannot be restored."),
    done=later("Deleted"),
    list_url_name="web:completion_list",
    list_title=later("Completions"),
    find=_find,
    act=_delete,
)
