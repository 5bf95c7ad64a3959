"""One adapter version: its page, files, deployment and deletion."""

from urllib.parse import urlencode

from django.conf import settings
from django.contrib import messages
from django.http import HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts.roles import Permission
from apps.adapters import queries
from apps.adapters.models import AdapterVersion
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.core.http.forms import domain_errors_shown
from apps.core.messages.translation import later
from apps.core.objects.downloads import stream_download, zip_chunks
from apps.core.objects.store import attachment
from apps.finetuning.conversions.orders import LABELS as EXPORTS
from apps.finetuning.conversions.orders import list_offers
from apps.finetuning.lifecycle import CONVERSION_OPEN
from apps.finetuning.queries import find_jobs_of_adapters
from apps.finetuning.results.missing_parts import list_missing
from apps.finetuning.results.model_cards import CARD_FILE
from apps.finetuning.results.model_files import documents
from apps.finetuning.results.provenance import BUNDLE_FILE
from apps.interfaces.web.adapters.lineage import ancestor_of, comparison_url, list_descendants, siblings_of
from apps.interfaces.web.adapters.pushes import shown_pushes
from apps.interfaces.web.adapters.traffic import traffic_of
from apps.interfaces.web.jobs.evaluation import evaluation_of
from apps.interfaces.web.shell.access import OrganizationRequest, may_write, organization_view
from apps.interfaces.web.shell.code_samples import chat_samples
from apps.serving import operations
from apps.serving.aliases import list_aliases
from apps.serving.keep_warm import warm_price
from apps.serving.models import Deployment
from apps.serving.queries import ServingState, ServingStatus, serving_states

CHANGING = ("waiting", "loading")


@require_safe
@organization_view(Permission.VIEW, is_of_any_project=True)
def detail(request: OrganizationRequest, version_id: str) -> HttpResponse:
    """Show one version. While its state changes or an export is made, htmx requests only that part."""
    version = queries.get_version(organization=request.organization, id=version_id)
    if request.htmx and request.headers.get("HX-Target", "").endswith("#adapter-exports"):
        job = find_jobs_of_adapters(organization=request.organization, versions=[version]).get(version.pk)
        context = {"version": version, "job": job, **_rights(version, request), **_exports(version, request)}
        response = render(request, "adapters/_exports.html", context)
    else:
        part = "#state" if request.htmx else ""
        response = render(request, f"adapters/detail.html{part}", _detail(version, request))
    patch_vary_headers(response, ["HX-Request", "HX-Target"])
    return response


def _detail(version: AdapterVersion, request: OrganizationRequest) -> dict[str, object]:
    serving: ServingState = serving_states(versions=[version])[version.pk]
    job = find_jobs_of_adapters(organization=request.organization, versions=[version]).get(version.pk)
    siblings = siblings_of(version)
    return {
        "version": version,
        "serving": serving,
        "can_be_served": serving.state != ServingStatus.FILES_ONLY,
        "is_changing": serving.state in CHANGING,
        "job": job,
        "ancestor": ancestor_of(job),
        "descendants": list_descendants(version),
        "metrics": [(_LABELS[name], version.metrics[name]) for name in _LABELS if version.metrics.get(name)],
        "files": [
            {"file": file, "url": f"{_download_address(version)}?{urlencode({'file': file['name']})}"}
            for file in version.manifest["files"]
        ],
        "archive_url": _download_address(version),
        "evaluation": evaluation_of(version),
        **_exports(version, request),
        "siblings": siblings,
        "comparison_url": comparison_url(version, siblings),
        "aliases": list_aliases(organization=request.organization).filter(adapter_id=version.adapter_id),
        "traffic": traffic_of(version),
        "warm_price": warm_price(base_model=version.adapter.base_model, organization=request.organization),
        "is_kept_warm": Deployment.objects.filter(
            adapter_version=version, removed_at=None, pinned_at__isnull=False
        ).exists(),
        "samples": chat_samples(model=version.model_name),
        **_rights(version, request),
    }


def _rights(version: AdapterVersion, request: OrganizationRequest) -> dict[str, object]:
    return {
        "may_write": may_write(request, Permission.ADAPTER_WRITE, version.adapter.project_id),
        "may_delete": may_write(request, Permission.ADAPTER_DELETE, version.adapter.project_id),
    }


def _exports(version: AdapterVersion, request: OrganizationRequest) -> dict[str, object]:
    """Return the version's downloads, conversions and pushes, and whether any of them is in progress."""
    offers = [offer for offer in list_offers(version=version) if offer.refusal is None or offer.is_open]
    pushes = shown_pushes(version)
    return {
        "papers": [
            {"label": label, "url": f"{_download_address(version)}?{urlencode({'file': name})}"}
            for label, name in ((gettext("Model card"), CARD_FILE), (gettext("Reproducibility file"), BUNDLE_FILE))
        ],
        "exports": [
            {
                "label": gettext(EXPORTS[export["kind"]]),
                "bytes": export["bytes"],
                "url": f"{_download_address(version)}?{urlencode({'export': export['kind']})}",
            }
            for export in version.exports
        ],
        "conversions": [{"offer": offer, "label": gettext(EXPORTS[offer.kind])} for offer in offers],
        "pushes": pushes,
        "may_push": settings.HUB_PUSHES and may_write(request, Permission.ADAPTER_WRITE, version.adapter.project_id),
        "is_making": any(offer.is_open for offer in offers)
        or any(each.push.status in CONVERSION_OPEN for each in pushes),
        "missing": list_missing(version),
    }


_LABELS = {
    "train_loss": later("Train loss, mean of the last 50 reports"),
    "valid_loss": later("Eval loss of these weights"),
}


def _download_address(version: AdapterVersion) -> str:
    return reverse("web:adapter_download", args=[version.pk])


@require_safe
@organization_view(Permission.VIEW)
def download(request: OrganizationRequest, version_id: str) -> HttpResponseBase:
    """Send one file through a link valid for minutes (?file=), or the whole adapter as an archive."""
    version = queries.get_version(organization=request.organization, id=version_id)
    name = request.GET.get("file", "")
    kind = request.GET.get("export", "")
    texts = documents(version=version, export=kind)
    if name in texts:
        return _text_file(name, texts[name])
    prefix, manifest = queries.find_files(version=version, export=kind)
    url = queries.download_url(version=version, name=name, export=kind) if name else ""
    if url or request.method == "GET":  # HEAD sends no archive, but it does send the link to a file
        by, action = request.membership.user_id, "adapter.downloaded"
        audit.record(organization=request.organization, by=by, action=action, target=version.pk, file=name)
    if url:
        return HttpResponseRedirect(url, headers={"Cache-Control": "no-store"})
    folder = "-".join(
        filter(None, (version.adapter.name, version.label.removeprefix("version ").replace(" ", "-"), kind))
    )
    files = [(f"{folder}/{file['name']}", f"{prefix}/{file['name']}") for file in manifest["files"]]
    papers = [(f"{folder}/{name}", text) for name, text in texts.items()]
    archive = zip_chunks(files, texts=papers)
    return stream_download(request, archive, filename=f"{folder}.zip", content_type="application/zip")


def _text_file(name: str, text: str) -> HttpResponse:
    kind = "application/json" if name == BUNDLE_FILE else "text/markdown; charset=utf-8"
    headers = {"Content-Disposition": attachment(name), "X-Content-Type-Options": "nosniff"}
    return HttpResponse(text, content_type=kind, headers=headers)


@require_POST
@organization_view(Permission.ADAPTER_WRITE)
def deploy(request: OrganizationRequest, version_id: str) -> HttpResponse:
    version = queries.get_version(organization=request.organization, id=version_id)
    with domain_errors_shown(request):
        operations.deploy(version=version, by=request.membership.user_id)
        messages.success(request, gettext("Loading. It answers in a moment."))
    return redirect("web:adapter_detail", version_id=version.pk)


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.ADAPTER_DELETE, is_sensitive=True)
def delete(request: OrganizationRequest, version_id: str) -> HttpResponse:
    """Require the adapter's name typed in full, then unload the version and delete its files."""
    version = queries.get_version(organization=request.organization, id=version_id)
    name = version.adapter.name
    context: dict[str, object] = {"version": version, "typed": name}
    if request.method != "POST":
        return render(request, "adapters/delete.html", context)
    if request.POST.get("confirm", "").strip() != name:
        context["problem"] = gettext("Type %(name)s to confirm.") % {"name": name}
        return render(request, "adapters/delete.html", context, status=422)
    try:
        operations.delete_model(
            organization=request.organization,
            model_name=version.model_name,
            by=request.membership.user_id,
            now=db_now(),
        )
    except DomainError as error:
        context["problem"] = error.message
        return render(request, "adapters/delete.html", context, status=422)
    messages.success(request, gettext("%(model_name)s was deleted.") % {"model_name": version.model_name})
    return redirect("web:adapter_list")
