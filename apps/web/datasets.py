"""Datasets: list, upload, one file with its rows as a model sees them, download, delete."""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts.models import Membership, Organization
from apps.accounts.queries import name_of_actor
from apps.accounts.roles import Permission, has_permission
from apps.catalog.models import BaseModel
from apps.catalog.queries import chat_renderer, list_base_models
from apps.contracts.chat import RowError
from apps.core import audit
from apps.core.clock import db_now
from apps.core.errors import DomainError
from apps.core.forms import add_domain_error
from apps.core.object_store import CHUNK_BYTES
from apps.datasets import intake, operations, queries
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.problems import MIN_ROWS
from apps.datasets.queries import RowPreview
from apps.finetuning.quotas import get_quota
from apps.web.access import organization_view
from apps.web.forms.datasets import UploadForm
from apps.web.row_view import RowView, row_view
from apps.web.svg import histogram

IN_PARTS_FROM_BYTES = 32 * 1024**2  # below, one request is quicker and sending it again costs little
ROWS_SHOWN = 20
ROWS_BEFORE = 3  # shown above a row that a link points at
VIEWS = (("chat", "Chat"), ("tokens", "Tokens"), ("json", "JSON"))
_PENDING = ("uploaded", "validating")


# --- list and upload --------------------------------------------------------------------------------------------------


@require_safe
@organization_view(Permission.VIEW)
def index(request: HttpRequest, organization: Organization, membership: Membership) -> HttpResponse:
    versions = list(queries.list_with_use(organization=organization))
    model = _chosen_model(request)
    counts = {count.version_id: count for count in queries.list_token_counts(versions=versions, base_model=model)}
    context = {
        "files": [{"version": version, "count": counts.get(version.pk)} for version in versions],
        "model": model,
        "models": _model_options(),
        "form": UploadForm(),
        "parts_from_bytes": IN_PARTS_FROM_BYTES,
        "may_upload": has_permission(membership.role, Permission.DATASET_WRITE),
        "is_live": any(version.status in _PENDING for version in versions),
        "command": _command(),
        "storage": _storage(organization),
    }
    is_part = request.headers.get("HX-Request") and versions
    response = render(request, "datasets/index.html" + ("#files" if is_part else ""), context)
    patch_vary_headers(response, ["HX-Request"])
    return response


def _command(separator: str = " ") -> str:
    """Return how to upload the same from a shell, on one line or with a line for each argument."""
    arguments = [
        f"curl {settings.PUBLIC_URL}/v1/files",
        '-H "Authorization: Bearer $ANNEAL_API_KEY"',
        "-F purpose=fine-tune",
        "-F file=@train.jsonl",
    ]
    return separator.join(arguments)


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.DATASET_WRITE)
def upload(request: HttpRequest, organization: Organization, membership: Membership) -> HttpResponse:
    """Take a file from a form; the file streams from disk to the store, and a task validates it."""
    form = UploadForm(request.POST, request.FILES) if request.method == "POST" else UploadForm()
    if request.method == "POST" and form.is_valid():
        version = _create(form, organization, membership)
        if version:
            return redirect("web:dataset_detail", version.pk)
    context = {"form": form, "command": _command(" \\\n  "), "parts_from_bytes": IN_PARTS_FROM_BYTES}
    return render(request, "datasets/upload.html", context, status=422 if form.is_bound else 200)


def _create(form: UploadForm, organization: Organization, membership: Membership) -> DatasetVersion | None:
    file = form.cleaned_data["file"]
    try:
        return intake.create_version(
            organization=organization,
            filename=file.name,
            purpose="fine-tune",
            chunks=file.chunks(CHUNK_BYTES),
            dataset_name=form.cleaned_data["name"] or None,
            storage_limit_bytes=get_quota(organization=organization).storage_bytes,
            by=membership.user_id,
            now=db_now(),
        )
    except DomainError as error:
        add_domain_error(form, error)
        return None


def _storage(organization: Organization) -> dict[str, int | None]:
    limit_bytes = get_quota(organization=organization).storage_bytes
    used_bytes = queries.storage_used_bytes(organization=organization)
    percent = min(100, round(100 * used_bytes / limit_bytes)) if limit_bytes else None
    return {"used_bytes": used_bytes, "limit_bytes": limit_bytes, "percent": percent}


# --- one file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListedRow:
    """One row of the list beside the chat."""

    line: int
    text: str
    tokens: int | None
    turns: int | None
    flag: str
    url: str


@dataclass(frozen=True)
class Check:
    """One finding: `level` is ok, warn or bad; `line` is where to look."""

    level: str
    text: str
    fix: str = ""
    url: str = ""


@dataclass(frozen=True)
class Address:
    """What the page shows, all of it in its URL."""

    version: DatasetVersion
    model: str
    first: int
    line: int
    view: str

    def url(self, **changes: Any) -> str:
        query = {"model": self.model, "first": self.first, "line": self.line, "view": self.view} | changes
        shown = {name: value for name, value in query.items() if value not in ("", None)}
        return f"{reverse('web:dataset_detail', args=[self.version.pk])}?{urlencode(shown)}"


@require_safe
@organization_view(Permission.VIEW)
def detail(request: HttpRequest, organization: Organization, membership: Membership, file_id: str) -> HttpResponse:
    """Show a file; htmx gets the part it asks for: the row viewer, or the whole while validation goes on."""
    version = queries.get_version(organization=organization, id=file_id)
    model = _chosen_model(request)
    address = _address(request, version, model)
    part = request.headers.get("HX-Target", "") if request.headers.get("HX-Request") else ""
    context = _viewer(version, model, address)
    if not part.endswith("#viewer"):
        context |= _summary(version, model, address, organization, membership)
    template = "datasets/detail.html" + ("#viewer" if part.endswith("#viewer") else "#dataset" if part else "")
    response = render(request, template, context)
    patch_vary_headers(response, ["HX-Request", "HX-Target"])
    return response


def _chosen_model(request: HttpRequest) -> BaseModel | None:
    models = list_base_models(only_installed=True)
    return models.filter(name=request.GET.get("model", "")).first() or models.first()


def _model_options() -> list[tuple[str, str]]:
    return [(model.name, model.display_name) for model in list_base_models(only_installed=True)]


def _address(request: HttpRequest, version: DatasetVersion, model: BaseModel | None) -> Address:
    view = request.GET.get("view", "")
    line = _number(request, "line")
    first = _number(request, "first") if "first" in request.GET else max(1, line - ROWS_BEFORE)
    return Address(
        version=version,
        model=model.name if model else "",
        first=first,
        line=line,
        view=view if view in dict(VIEWS) else "chat",
    )


def _number(request: HttpRequest, name: str) -> int:
    text = request.GET.get(name, "")
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 10 else 1


def _viewer(version: DatasetVersion, model: BaseModel | None, address: Address) -> dict[str, Any]:
    previews = [] if version.status in _PENDING else _previews(version, address)
    rows = [_listed(preview, model, address) for preview in previews]
    chosen = next((preview for preview in previews if preview.line >= address.line), None)
    shown, error = _rendered(chosen, model)
    return {
        "version": version,
        "model": model,
        "models": _model_options(),
        "address": address,
        "rows": rows,
        "chosen": chosen,
        "shown": shown,
        "row_error": error,
        "json": _pretty(chosen.raw) if chosen and address.view == "json" else "",
        "views": [
            {"label": label, "url": address.url(view=key), "current": key == address.view} for key, label in VIEWS
        ],
        "previous_url": address.url(**_page_at(address.first - ROWS_SHOWN)) if address.first > 1 else "",
        "next_url": address.url(**_page_at(rows[-1].line + 1)) if len(rows) == ROWS_SHOWN else "",
    }


def _page_at(line: int) -> dict[str, int]:
    return {"first": max(1, line), "line": max(1, line)}


def _previews(version: DatasetVersion, address: Address) -> list[RowPreview]:
    """Return the rows from the first one shown; a line that lies outside of them moves the list to itself."""
    previews = queries.read_rows(version=version, first_line=address.first, limit=ROWS_SHOWN)
    if address.line < address.first or (previews and address.line > previews[-1].line):
        return queries.read_rows(version=version, first_line=address.line, limit=ROWS_SHOWN)
    return previews


def _listed(preview: RowPreview, model: BaseModel | None, address: Address) -> ListedRow:
    view, error = _rendered(preview, model)
    is_cut = bool(view and model and view.token_count > model.context_length)
    row = preview.row
    text = next((m.content for m in row.messages if m.role == "user"), "") if row else preview.raw
    return ListedRow(
        line=preview.line,
        text=" ".join(text[:200].split()) or "(empty)",
        tokens=view.token_count if view else None,
        turns=len(row.messages) if row else None,
        flag="error" if error else "cut" if is_cut else "",
        url=address.url(line=preview.line),
    )


def _rendered(preview: RowPreview | None, model: BaseModel | None) -> tuple[RowView | None, dict[str, Any] | None]:
    """Return the row as the model sees it, or what is wrong with it."""
    if preview is None:
        return None, None
    if preview.error:
        return None, {"message": preview.error.message, "fix": preview.error.fix, "param": preview.error.param}
    if preview.row is None or model is None:
        return None, None
    renderer = chat_renderer(base_model=model)
    try:
        return row_view(preview.row, renderer.render(preview.row), renderer), None
    except RowError as error:
        return None, {"message": error.message, "fix": error.fix, "param": error.param}


def _pretty(raw: str) -> str:
    try:
        return json.dumps(json.loads(raw), indent=2, ensure_ascii=False)
    except ValueError:
        return raw


def _summary(
    version: DatasetVersion, model: BaseModel | None, address: Address, organization: Organization, member: Membership
) -> dict[str, Any]:
    count, refusal, is_counting = _count(version, model)
    limit = model.context_length if model else None
    is_pending = version.status in _PENDING
    return {
        "count": count,
        "limit": limit,
        "is_pending": is_pending,
        "is_live": is_pending or is_counting,
        "is_counting": is_counting,
        "trained_share": count.trained_tokens / count.tokens if count and count.tokens else None,
        "plot": histogram(count.histogram, limit=limit) if count else None,
        "checks": _checks(version, count, refusal, limit, address),
        "hidden_error_count": version.error_count - len(version.errors),
        "siblings": queries.list_siblings(version=version),
        "jobs": version.jobs.select_related("base_model").order_by("-created_at")[:10],
        "uploader": name_of_actor(organization=organization, actor=version.created_by),
        "may_write": has_permission(member.role, Permission.DATASET_WRITE),
        "may_train": has_permission(member.role, Permission.JOB_WRITE),
    }


def _count(
    version: DatasetVersion, model: BaseModel | None
) -> tuple[TokenCount | None, operations.RowRefused | None, bool]:
    """Return the count, or the row that prevents it, or whether a task is at it."""
    if version.status != "ready" or model is None:
        return None, None, False
    found = queries.find_token_count(version=version, base_model=model)
    if found or version.bytes > operations.COUNT_NOW_BYTES:
        if not found:
            operations.request_count(version=version, base_model=model)
        return found, None, found is None
    try:
        return operations.count_tokens(version=version, base_model=model), None, False
    except operations.RowRefused as error:
        return None, error, False


def _checks(
    version: DatasetVersion,
    count: TokenCount | None,
    refusal: operations.RowRefused | None,
    limit: int | None,
    address: Address,
) -> list[Check]:
    if version.status == "invalid":
        return [
            Check("bad", f"Line {error['line']:,}: {error['message']}", error["fix"], _page_url(address, error["line"]))
            for error in version.errors
        ]
    if version.status != "ready":
        return []
    checks = [
        Check("ok", "UTF-8 text, one JSON object a line"),
        Check("ok", f"{version.rows:,} chat rows, at least {MIN_ROWS} needed"),
        Check("ok", "Every row ends with an answer to learn from"),
    ]
    if refusal:
        checks.append(Check("bad", refusal.message, "", _page_url(address, refusal.data["line"])))
    if count and limit:
        checks.append(_length_check(count, limit))
    return checks


def _page_url(address: Address, line: int) -> str:
    return address.url(line=line, first=max(1, line - ROWS_BEFORE))


def _length_check(count: TokenCount, limit: int) -> Check:
    if count.longest_row_tokens <= limit:
        return Check("ok", f"Every row fits the model's {limit:,} tokens")
    surely = sum(
        rows for (low, _), (_, rows) in zip(count.histogram, count.histogram[1:], strict=False) if low >= limit
    )
    what = f"At least {surely:,} {'row is' if surely == 1 else 'rows are'}" if surely else "Some rows are"
    return Check("warn", f"{what} longer than the model's {limit:,} tokens and will be cut")


# --- download and delete ----------------------------------------------------------------------------------------------


@require_safe
@organization_view(Permission.VIEW)
def download(request: HttpRequest, organization: Organization, membership: Membership, file_id: str) -> HttpResponse:
    """Send the browser to a link that is good for a few minutes."""
    version = queries.get_version(organization=organization, id=file_id)
    audit.record(organization=organization, by=membership.user_id, action="dataset.downloaded", target=version.pk)
    response = HttpResponseRedirect(queries.download_url(version=version))
    response.headers["Cache-Control"] = "no-store"
    return response


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.DATASET_WRITE)
def delete(request: HttpRequest, organization: Organization, membership: Membership, file_id: str) -> HttpResponse:
    """Ask for the file's name typed in full, then delete it."""
    version = queries.get_version(organization=organization, id=file_id)
    context: dict[str, Any] = {"version": version, "typed": version.filename}
    if request.method != "POST":
        return render(request, "datasets/delete.html", context)
    if request.POST.get("confirm", "").strip() != version.filename:
        context["problem"] = f"Type {version.filename} to confirm."
        return render(request, "datasets/delete.html", context, status=422)
    try:
        operations.delete_version(version=version, by=membership.user_id, now=db_now())
    except DomainError as error:
        context["problem"] = error.message
        return render(request, "datasets/delete.html", context, status=422)
    messages.success(request, f"{version.filename} was deleted.")
    return redirect("web:dataset_list")
