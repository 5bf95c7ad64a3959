"""Stored completions: the list with its filter, the page of one, deletion, and datasets made of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from django import forms
from django.conf import settings
from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpResponse, HttpResponseBase, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts.queries import name_of_actor
from apps.accounts.roles import Permission, has_permission
from apps.batches.completions import operations, queries
from apps.batches.completions.models import StoredCompletion
from apps.core.database.clock import db_now
from apps.core.database.keyset import read_page
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.core.objects.downloads import download_csv
from apps.interfaces.web.shell.access import OrganizationRequest, may_write, organization_view
from apps.interfaces.web.shell.current_project import find_current_project, of_project, project_of_new_work

_PAGE = 25
_EXPORTED = ("id", "model", "created_at", "metadata", "bytes", "question", "answer")
_MOST_CHARACTERS, _MOST_MESSAGES = 20_000, 100  # of a message, and of a completion, that a page shows
_SETTINGS = ("temperature", "top_p", "max_completion_tokens", "max_tokens", "seed", "n", "stop", "response_format")


@dataclass(frozen=True, kw_only=True)
class ShownMessage:
    """A message as text; `is_cut` if it is longer than a page shows."""

    role: str
    text: str
    is_cut: bool


class CompletionFilterForm(forms.Form):
    """The filter of the list: a model, and pairs of metadata that a completion must all have."""

    model = forms.ChoiceField(required=False, label=later("Model"))
    metadata = forms.CharField(
        required=False,
        max_length=2000,
        label=later("Metadata"),
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false", "placeholder": "team=search"}),
    )

    def __init__(self, data: QueryDict, *, models: Iterable[str]) -> None:
        super().__init__(data)
        names = dict.fromkeys([*models, data.get("model", "")])
        choices = [("", gettext("All models")), *((name, name) for name in names if name)]
        self.fields["model"].choices = choices  # type: ignore[attr-defined]

    def clean_metadata(self) -> dict[str, str]:
        pairs = [part.partition("=") for part in self.cleaned_data["metadata"].split(",") if part.strip()]
        if not all(name.strip() and equals for name, equals, _ in pairs):
            raise forms.ValidationError(gettext("Metadata is written name=value, with commas between."))
        return {name.strip(): value.strip() for name, _, value in pairs}

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the filter of a checked form, in the form that the domain expects."""
        return {
            "model_name": self.cleaned_data.get("model") or None,
            "metadata": self.cleaned_data.get("metadata") or None,
        }


class CompletionDatasetForm(forms.Form):
    name = forms.CharField(
        max_length=120,
        label=later("Name of the dataset"),
        help_text=later("A dataset of this name gets a new version."),
    )


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    return _list(request, CompletionDatasetForm())


@require_POST
@organization_view(Permission.DATASET_WRITE)
def make_dataset(request: OrganizationRequest) -> HttpResponse:
    """Make a dataset of the newest completions that the filter in the address shows."""
    form, chosen = CompletionDatasetForm(request.POST), _filter(request)
    if form.is_valid() and chosen.is_valid():
        with domain_errors_on(form):
            project, current = project_of_new_work(request), find_current_project(request)
            version = operations.create_dataset(
                organization=request.organization,
                name=form.cleaned_data["name"],
                by=request.membership.user_id,
                now=db_now(),
                of_project=current.pk if current else "",
                project=project.pk,
                **chosen.chosen,
            )
            messages.success(request, gettext("The dataset is created. Its rows are being checked."))
            return redirect("web:dataset_detail", file_id=version.pk)
    return _list(request, form)


def _filter(request: OrganizationRequest) -> CompletionFilterForm:
    return CompletionFilterForm(request.GET, models=queries.list_model_names(organization=request.organization))


def _list(request: OrganizationRequest, form: CompletionDatasetForm) -> HttpResponse:
    chosen = _filter(request)
    project = find_current_project(request)
    rows = of_project(project, _found(request, chosen)).defer("request", "answer")
    page = read_page(rows, request.GET, order=("-created_at", "-id"), size=_PAGE)
    openings = queries.last_questions(completions=page.rows)
    asked = {name: request.GET[name] for name in ("model", "metadata") if request.GET.get(name)}
    address = reverse("web:completion_list")
    context = {
        "rows": [
            {"completion": row, "question": openings.get(row.pk, ""), "metadata": list(row.metadata.items())}
            for row in page.rows
        ],
        "filter": chosen,
        "is_filtered": bool(asked),
        "project": project,
        "form": form,
        "export_url": f"{reverse('web:completion_export')}?{urlencode(asked)}",
        "dataset_url": f"{reverse('web:completion_dataset')}?{urlencode(asked)}",
        "previous": f"{address}?{urlencode(asked | page.previous)}" if page.has_previous else "",
        "next": f"{address}?{urlencode(asked | page.next)}" if page.has_next else "",
        "page_size": _PAGE,
        "kept_days": settings.STORED_COMPLETION_DAYS,
        "most_rows": operations.MAX_ROWS,
        "may_delete": has_permission(request.membership.role, Permission.INFERENCE),
        "may_make": has_permission(request.membership.role, Permission.DATASET_WRITE),
    }
    return render(request, "batches/completions.html", context, status=422 if form.errors or chosen.errors else 200)


@require_safe
@organization_view(Permission.VIEW)
def export(request: OrganizationRequest) -> HttpResponseBase:
    """Send the newest completions that the filter in the address shows as a CSV file, with question and answer."""
    project, found = find_current_project(request), _found(request, _filter(request))
    rows = [
        (
            row.pk, row.model_name, row.created_at.isoformat(), msgspec.json.encode(row.metadata).decode(), row.bytes,
            question, answer,
        )
        for row, question, answer in queries.read_newest(completions=of_project(project, found))
    ]  # fmt: skip
    return download_csv(request, _EXPORTED, rows, filename="stored-completions.csv")


def _found(request: OrganizationRequest, chosen: CompletionFilterForm) -> QuerySet[StoredCompletion]:
    """Return the completions that match the filter; none if the filter is invalid."""
    if not chosen.is_valid():
        return queries.list_completions(organization=request.organization).none()
    return queries.list_completions(organization=request.organization, **chosen.chosen)


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
