"""Webhooks: the list of endpoints, the page of one with its delivery log, and the actions on it."""

from collections.abc import Sequence

from django import forms
from django.contrib import messages
from django.forms.boundfield import BoundWidget
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from apps.accounts.models import EndpointStatus, WebhookEndpoint, WebhookFormat
from apps.accounts.notices import endpoints
from apps.accounts.notices.events import EVENT_TYPES
from apps.accounts.notices.notifications import LOG_KEPT
from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.http.confirmation import AffectedRow, ConfirmedAction, confirm, say_undoable
from apps.core.http.forms import domain_errors_on
from apps.core.messages.translation import later
from apps.core.objects.page_tables import rows_at_once
from apps.core.secrets.shown_once import keep_secret, take_secret
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

_PAGE = 25
_SESSION_SECRET = "webhook_secret"  # noqa: S105 - a name
_AT_FIRST = [each for each in EVENT_TYPES if each.startswith(("fine_tuning.", "batch."))]
# The subjects in their order, with the first part of the types that belong to each.
_SUBJECTS = (
    (later("Fine-tunes"), ("fine_tuning",)),
    (later("Batches"), ("batch",)),
    (later("Evals"), ("eval",)),
    (later("Adapters"), ("adapter",)),
    (later("Retraining"), ("retraining",)),
    (later("Money"), ("budget", "balance", "credit", "invoice")),
    (later("Members and webhooks"), ("member", "service_account", "webhook")),
)


class WebhookForm(forms.Form):
    name = forms.CharField(
        label=later("Name"), max_length=100, required=False, help_text=later("Shown in your list of webhooks.")
    )
    url = forms.CharField(
        label="URL",
        max_length=400,
        help_text=later("An https address of the public internet, such as https://hooks.example.com/anneal."),
    )
    format = forms.ChoiceField(
        label=later("Format"),
        choices=WebhookFormat.choices,
        help_text=later("For Slack, enter the URL of an incoming webhook."),
    )
    event_types = forms.MultipleChoiceField(
        label=later("Events"),
        choices=[(each, each) for each in EVENT_TYPES],
        widget=forms.CheckboxSelectMultiple,
        initial=_AT_FIRST,
    )

    @property
    def event_groups(self) -> list[tuple[str, list[BoundWidget]]]:
        """Return the boxes of each subject."""
        boxes = list(self["event_types"])
        return [
            (subject, [box for box in boxes if box.choice_label.partition(".")[0] in parts])
            for subject, parts in _SUBJECTS
        ]


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.WEBHOOK_MANAGE, is_sensitive=True)
def index(request: OrganizationRequest) -> HttpResponse:
    """List the webhooks. A POST creates one and shows its secret once, on its page."""
    form = WebhookForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        with domain_errors_on(form):
            endpoint, secret = endpoints.create_endpoint(
                organization=request.organization, by=request.membership.user_id, **form.cleaned_data
            )
            keep_secret(request, _SESSION_SECRET, owner=endpoint.pk, secret=secret)
            return redirect("web:webhook_detail", webhook_id=endpoint.pk)
    context = {"form": form, "endpoints": endpoints.list_endpoints(organization=request.organization)}
    return render(request, "account/organization/webhooks.html", context, status=422 if form.errors else 200)


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.WEBHOOK_MANAGE, is_sensitive=True)
def detail(request: OrganizationRequest, webhook_id: str) -> HttpResponse:
    """Show a webhook with its delivery log. A POST changes it."""
    endpoint = _get(request, webhook_id)
    initial = {name: getattr(endpoint, name) for name in WebhookForm.base_fields}
    form = WebhookForm(request.POST if request.method == "POST" else None, initial=initial)
    if request.method == "POST" and form.is_valid():
        with domain_errors_on(form):
            endpoints.change_endpoint(
                endpoint=endpoint, by=request.membership.user_id, now=db_now(), **form.cleaned_data
            )
            messages.success(request, gettext("The webhook is saved."))
            return redirect("web:webhook_detail", webhook_id=webhook_id)
    before = request.GET.get("before", "").replace("\x00", "")
    rows = endpoints.list_deliveries(endpoint=endpoint)
    size = rows_at_once(request, "deliveries", _PAGE)
    found = list((rows.filter(pk__lt=before) if before else rows)[: size + 1])
    issued = take_secret(request, _SESSION_SECRET, owner=endpoint.pk)
    context = {
        "endpoint": endpoint,
        "form": form,
        "secret": issued[1] if issued else "",
        "deliveries": found[:size],
        "older": f"?before={found[size - 1].pk}" if len(found) > size else "",
        "newest": request.path if before else "",
        "page_size": _PAGE,
        "kept_days": LOG_KEPT.days,
    }
    return render(request, "account/organization/webhook.html", context, status=422 if form.errors else 200)


@require_POST
@organization_view(Permission.WEBHOOK_MANAGE)
def pause(request: OrganizationRequest, webhook_id: str) -> HttpResponse:
    """Pause the webhook; with `off`, resume it. Repeating either changes nothing."""
    endpoint = _get(request, webhook_id)
    is_paused = "off" not in request.POST
    was_disabled = endpoint.status == EndpointStatus.DISABLED
    endpoints.set_paused(endpoint=endpoint, is_paused=is_paused, by=request.membership.user_id, now=db_now())
    text = gettext("The webhook is paused.") if is_paused else gettext("The webhook is active.")
    if was_disabled:  # an undo would pause it instead
        messages.success(request, text)
    else:
        say_undoable(request, text, url=request.path, **({"off": "1"} if is_paused else {}))
    return redirect("web:webhook_detail", webhook_id=webhook_id)


@require_POST
@organization_view(Permission.WEBHOOK_MANAGE, is_sensitive=True)
def rotate(request: OrganizationRequest, webhook_id: str) -> HttpResponse:
    """Make a new secret and show it once."""
    endpoint = _get(request, webhook_id)
    secret = endpoints.rotate_secret(endpoint=endpoint, by=request.membership.user_id, now=db_now())
    keep_secret(request, _SESSION_SECRET, owner=endpoint.pk, secret=secret)
    return redirect("web:webhook_detail", webhook_id=webhook_id)


@require_POST
@organization_view(Permission.WEBHOOK_MANAGE)
def test(request: OrganizationRequest, webhook_id: str) -> HttpResponse:
    endpoints.send_test(endpoint=_get(request, webhook_id), by=request.membership.user_id)
    messages.success(request, gettext("A test event is on its way. Reload this page to see the answer."))
    return redirect("web:webhook_detail", webhook_id=webhook_id)


@require_POST
@organization_view(Permission.WEBHOOK_MANAGE)
def replay(request: OrganizationRequest, webhook_id: str, delivery_id: str) -> HttpResponse:
    endpoint = _get(request, webhook_id)
    endpoints.replay(endpoint=endpoint, delivery_id=delivery_id, by=request.membership.user_id)
    messages.success(request, gettext("The event is sent again."))
    return redirect("web:webhook_detail", webhook_id=webhook_id)


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.WEBHOOK_MANAGE)
def delete(request: OrganizationRequest) -> HttpResponse:
    """Delete a webhook, after the user typed its address."""
    return confirm(request, _DELETE)


def _get(request: OrganizationRequest, webhook_id: str) -> WebhookEndpoint:
    return endpoints.get_endpoint(organization=request.organization, endpoint_id=webhook_id)


def _find(request: OrganizationRequest, ids: Sequence[str]) -> list[AffectedRow]:
    rows = endpoints.list_endpoints(organization=request.organization).filter(pk__in=ids)
    effect = gettext("It gets no more events, and its delivery log is deleted.")
    return [AffectedRow(row.pk, row.url, f"{row.name}: {effect}" if row.name else effect) for row in rows]


def _delete(request: OrganizationRequest, webhook_id: str) -> None:
    endpoints.delete_endpoint(endpoint=_get(request, webhook_id), by=request.membership.user_id)


_DELETE = ConfirmedAction[OrganizationRequest](
    parameter="webhook",
    verb=later("Delete"),
    nouns=(later("webhook"), later("webhooks")),
    warning=later("A deleted webhook cannot be restored."),
    done=later("Deleted"),
    list_url_name="web:webhook_list",
    list_title=later("Webhooks"),
    find=_find,
    act=_delete,
)
