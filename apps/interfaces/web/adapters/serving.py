"""The actions on a served adapter: move an alias, roll it back, keep a version warm, and use a checkpoint's adapter."""

import re
from collections.abc import Callable, Sequence
from urllib.parse import urlencode

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.accounts.roles import Permission
from apps.adapters.queries import get_version
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, NotFound
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm, say_undoable
from apps.core.http.forms import domain_errors_shown
from apps.core.messages.translation import later, translated
from apps.core.objects.downloads import stream_download, zip_chunks
from apps.finetuning.recipes.start_points import find_checkpoint
from apps.finetuning.results.checkpoint_models import adapter_files, serve_checkpoint
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.serving import aliases
from apps.serving import keep_warm as warmth

_KEPT = 240  # characters of what was entered


@require_POST
@organization_view(Permission.ADAPTER_WRITE)
def point_alias(request: OrganizationRequest, version_id: str) -> HttpResponse:
    """Point a new or an existing alias at this version, or make it the canary for a share of the alias's requests."""
    version = get_version(organization=request.organization, id=version_id)
    percent = request.POST.get("canary_percent", "").strip()
    name = request.POST.get("name", "").strip()
    page = reverse("web:adapter_detail", args=[version_id])
    page_with_input = f"{page}?{urlencode({'alias': name[:_KEPT], 'canary_percent': percent[:_KEPT]})}#aliases"

    if percent and not re.fullmatch("[0-9]{1,2}", percent):
        messages.error(
            request, gettext("A canary gets 1 to 99 percent. Leave the percentage out to move all requests.")
        )
        return redirect(page_with_input)
    of_name = aliases.list_aliases(organization=request.organization).filter(name=name)
    with domain_errors_shown(request), aliases.loading_what_is_cold():
        before = {alias.pk: alias for alias in of_name}
        alias = aliases.point_alias(
            version=version,
            name=name,
            canary_percent=int(percent or 0),
            by=request.membership.user_id,
            now=db_now(),
        )
        share = gettext("{percent} % of ").format(percent=alias.canary_percent) if alias.canary_percent else ""
        text = gettext("%(share)s%(name)s is answered by %(label)s within a second.") % {
            "share": share,
            "name": alias.name,
            "label": translated(version.label),
        }
        was = before.get(alias.pk)
        if was and was.version_id != version.pk and was.canary_version_id is None:
            say_undoable(request, text, url=reverse("web:alias_point", args=[was.version_id]), name=name)
        else:
            messages.success(request, text)
        return redirect(page)
    return redirect(page_with_input)


@require_POST
@organization_view(Permission.ADAPTER_WRITE)
def roll_back_alias(request: OrganizationRequest, alias_id: str) -> HttpResponse:
    """End the alias's canary, or return to its previous version. To undo it points the alias as it was."""
    alias = aliases.get_alias(organization=request.organization, id=alias_id)
    page = redirect("web:adapter_detail", version_id=alias.version_id)
    undo = reverse("web:alias_point", args=[alias.canary_version_id or alias.version_id])
    share = {"canary_percent": str(alias.canary_percent)} if alias.canary_percent else {}
    with domain_errors_shown(request):
        back = aliases.roll_back(alias=alias, by=request.membership.user_id, now=db_now())
        label = translated(back.version.label)
        text = gettext("%(name)s is answered by %(label)s again.") % {"name": back.name, "label": label}
        say_undoable(request, text, url=undo, name=back.name, **share)
    return page


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.ADAPTER_WRITE, is_sensitive=True)
def delete_alias(request: OrganizationRequest) -> HttpResponse:
    return confirm(request, _DELETE_ALIAS)


def _find_aliases(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    return [
        AffectedRow(
            alias.pk,
            alias.name,
            gettext("Requests for %(model_name)s are refused. The versions keep their own names and keep answering.")
            % {"model_name": alias.model_name},
            reverse("web:adapter_detail", args=[alias.version_id]),
        )
        for alias in aliases.list_aliases(organization=request.organization).filter(pk__in=ids)
    ]


def _delete_alias(request: OrganizationRequest, alias_id: str) -> None:
    alias = aliases.get_alias(organization=request.organization, id=alias_id)
    aliases.delete_alias(alias=alias, by=request.membership.user_id)


_DELETE_ALIAS = ConfirmedAction[OrganizationRequest](
    parameter="alias",
    verb=later("Delete"),
    nouns=(later("alias"), later("aliases")),
    warning=later("Programs that use this name get an error."),
    done=later("Deleted"),
    list_url_name="web:adapter_list",
    list_title=later("Adapters"),
    find=_find_aliases,
    act=_delete_alias,
)


@require_POST
@organization_view(Permission.ADAPTER_WRITE)
def keep_warm(request: OrganizationRequest, version_id: str) -> HttpResponse:
    """Keep the version warm at its price. `?off` ends this."""
    version = get_version(organization=request.organization, id=version_id)

    def act() -> str:
        if "off" in request.POST:
            warmth.let_cool(version=version, by=request.membership.user_id, now=db_now())
            return gettext("The adapter loads on demand again. It costs nothing while idle.")
        warmth.keep_warm(version=version, by=request.membership.user_id, now=db_now())
        return gettext("The adapter is kept warm. You pay by the millisecond while it is loaded.")

    return _act(request, version_id, act)


@require_POST
@organization_view(Permission.ADAPTER_WRITE)
def try_checkpoint(request: OrganizationRequest, checkpoint_id: str) -> HttpResponse:
    """Deploy the checkpoint's adapter and open it in the playground beside its base model."""
    try:
        version = serve_checkpoint(
            organization=request.organization, checkpoint_id=checkpoint_id, by=request.membership.user_id
        )
    except NotFound:
        raise
    except DomainError as refused:
        messages.error(request, refused.message)
        job = find_checkpoint(request.organization, checkpoint_id).job
        return redirect(f"{reverse('web:job_detail', args=[job.pk])}?tab=checkpoints")
    return redirect(f"{reverse('web:playground')}?{urlencode({'model': version.model_name})}")


@require_safe
@organization_view(Permission.VIEW)
def download_checkpoint(request: OrganizationRequest, checkpoint_id: str) -> HttpResponseBase:
    """Send the checkpoint's adapter as an archive."""
    checkpoint, files = adapter_files(organization=request.organization, checkpoint_id=checkpoint_id)
    if request.method == "GET":  # HEAD sends no content
        by, action = request.membership.user_id, "checkpoint.downloaded"
        audit.record(organization=request.organization, by=by, action=action, target=checkpoint.pk)
    folder = f"{checkpoint.job.adapter_name}-step-{checkpoint.step}"
    archive = zip_chunks([(f"{folder}/{name}", key) for name, key in files])
    return stream_download(request, archive, filename=f"{folder}.zip", content_type="application/zip")


def _act(request: HttpRequest, version_id: str, act: Callable[[], str]) -> HttpResponse:
    with domain_errors_shown(request):
        messages.success(request, act())
    return redirect("web:adapter_detail", version_id=version_id)
