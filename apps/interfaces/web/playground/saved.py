"""What members save in the playground: their conversations, and presets of settings."""

import datetime
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec
from django import forms
from django.contrib import messages
from django.http import HttpResponse, JsonResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe
from django_htmx.http import HttpResponseClientRedirect

from apps.accounts.roles import Permission, has_permission
from apps.core.database.clock import db_now
from apps.core.errors import DomainError
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm
from apps.core.http.forms import domain_errors_on
from apps.core.http.json_bodies import decode_body, json_of
from apps.core.messages.translation import later
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.playground.conversations import MAX_CONVERSATIONS, delete_conversations, keep_conversation, list_conversations
from apps.playground.presets import delete_preset, list_presets, may_change, save_preset
from apps.playground.transcripts import PlaySettings, Transcript


class KeptConversation(Transcript, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str = ""
    kept_at: datetime.datetime | None = None


_conversation_decoder = msgspec.json.Decoder(KeptConversation)
_settings_decoder = msgspec.json.Decoder(PlaySettings)


class PresetForm(forms.Form):
    """The name of a preset. `settings` are the page's, as JSON."""

    name = forms.CharField(max_length=60)
    is_shared = forms.BooleanField(label=later("Share with the organization"), required=False)
    settings = forms.CharField(widget=forms.HiddenInput({"data-play-settings": ""}))


@require_safe
@organization_view(Permission.VIEW)
def index(request: OrganizationRequest) -> HttpResponse:
    context = {
        "conversations": list_conversations(membership=request.membership),
        "presets": [
            (preset, may_change(preset, by=request.membership))
            for preset in list_presets(membership=request.membership)
        ],
        "most": MAX_CONVERSATIONS,
        "may_ask": has_permission(request.membership.role, Permission.INFERENCE),
    }
    return render(request, "adapters/playground_saved.html", context)


@require_POST
@organization_view(Permission.INFERENCE)
def keep(request: OrganizationRequest) -> JsonResponse:
    """Store the conversation of the page. Return the id under which the page opens it again, and the time."""
    try:
        sent = decode_body(json_of(request), _conversation_decoder)
        transcript = Transcript(settings=sent.settings, columns=sent.columns)
        kept = keep_conversation(
            membership=request.membership, transcript=transcript, id=sent.id, kept_at=sent.kept_at, now=db_now()
        )
    except DomainError as refused:
        return JsonResponse(refused.as_openai(), status=refused.status)
    return JsonResponse({"id": kept.pk, "kept_at": kept.updated_at.isoformat()})


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW)
def delete(request: OrganizationRequest) -> HttpResponse:
    """Delete the member's conversations that the address names, after a confirmation; a form that names none, all."""
    if request.method == "POST" and "conversation" not in request.POST:
        delete_conversations(membership=request.membership)
        return redirect("web:playground_saved")
    return confirm(request, _DELETE)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    effect = gettext("Its messages and ratings are deleted. Rows that you saved stay.")
    rows = list_conversations(membership=request.membership).filter(pk__in=ids)
    return [AffectedRow(row.pk, row.title, effect) for row in rows]


def _delete(request: OrganizationRequest, conversation_id: str) -> None:
    delete_conversations(membership=request.membership, id=conversation_id)


_DELETE = ConfirmedAction[OrganizationRequest](
    parameter="conversation",
    verb=later("Delete"),
    nouns=(later("conversation"), later("conversations")),
    warning=later("A deleted conversation cannot be restored."),
    done=later("Deleted"),
    list_url_name="web:playground_saved",
    list_title=later("Playground history"),
    find=_find,
    act=_delete,
    is_typed=False,
)


@require_POST
@organization_view(Permission.INFERENCE)
def create_preset(request: OrganizationRequest) -> HttpResponse:
    """Save a preset and open the page with it. The conversation stays in the page."""
    form = PresetForm(request.POST, auto_id="preset_%s")
    if form.is_valid():
        with domain_errors_on(form):
            preset = save_preset(
                membership=request.membership,
                name=form.cleaned_data["name"],
                is_shared=form.cleaned_data["is_shared"],
                settings=decode_body(form.cleaned_data["settings"].encode(), _settings_decoder),
                now=db_now(),
            )
            messages.success(request, gettext("“%(name)s” is saved.") % {"name": preset.name})
            shown = QueryDict(urlsplit(request.htmx.current_url or "").query).get("conversation", "")
            query = QueryDict(mutable=True)
            query.update({"preset": preset.pk} | ({"conversation": shown} if shown else {}))
            return HttpResponseClientRedirect(f"{reverse('web:playground')}?{query.urlencode()}")
    return render(request, "adapters/playground.html#preset", {"preset_form": form}, status=422)


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.INFERENCE)
def delete_presets(request: OrganizationRequest) -> HttpResponse:
    """Delete one or several presets, after the user typed the name or the number of presets."""
    return confirm(request, _DELETE_PRESETS)


def _find_presets(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    own = gettext("Only you use it.")
    shared = gettext("All members of %(name)s lose it.") % {"name": request.organization.name}
    rows = list_presets(membership=request.membership).filter(pk__in=ids)
    return [AffectedRow(row.pk, row.name, own if row.membership_id else shared) for row in rows]


def _delete_preset(request: OrganizationRequest, preset_id: str) -> None:
    delete_preset(membership=request.membership, id=preset_id)


_DELETE_PRESETS = ConfirmedAction[OrganizationRequest](
    parameter="preset",
    verb=later("Delete"),
    nouns=(later("preset"), later("presets")),
    warning=later("A deleted preset cannot be restored."),
    done=later("Deleted"),
    list_url_name="web:playground_saved",
    list_title=later("Playground history"),
    find=_find_presets,
    act=_delete_preset,
)
