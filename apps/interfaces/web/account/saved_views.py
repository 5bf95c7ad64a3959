"""Views of lists that a member saves under a name: each is a link above its list."""

from django.contrib import messages
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.translation import gettext
from django.views.decorators.http import require_POST

from apps.accounts.operations import delete_view, save_view
from apps.accounts.roles import Permission
from apps.core.errors import NotFound
from apps.core.http.confirmation import say_undoable
from apps.core.http.forms import domain_errors_shown
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view

_LISTS = (
    "web:job_list", "web:dataset_list", "web:adapter_list", "web:key_list", "web:member_list", "web:batch_list",
    "web:eval_list", "web:completion_list",
)  # fmt: skip
_MAX_QUERY_CHARACTERS = 2_000


@require_POST
@organization_view(Permission.VIEW)
def save(request: OrganizationRequest) -> HttpResponse:
    listing = request.POST.get("listing", "")
    if listing not in _LISTS:
        raise NotFound(gettext("No such list."))
    query = QueryDict(request.POST.get("query", "")[:_MAX_QUERY_CHARACTERS]).urlencode()
    with domain_errors_shown(request):
        view = save_view(membership=request.membership, listing=listing, name=request.POST.get("name", ""), query=query)
        messages.success(request, gettext("Saved the view “%(name)s”.") % {"name": view.name})
    return redirect(f"{reverse(listing)}?{query}")


@require_POST
@organization_view(Permission.VIEW)
def delete(request: OrganizationRequest, view_id: str) -> HttpResponse:
    view = delete_view(membership=request.membership, view_id=view_id)
    text = gettext("Deleted the view “%(name)s”.") % {"name": view.name}
    fields = {"listing": view.listing, "name": view.name, "query": view.query}
    say_undoable(request, text, url=reverse("web:view_save"), **fields)
    return redirect(view.listing)
