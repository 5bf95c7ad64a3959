"""The reader's own account: name, time zone, theme, and which mails they get."""

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods

from apps.accounts.models import User
from apps.core.messages.translation import later
from apps.interfaces.web.account.forms import PersonForm
from apps.interfaces.web.shell.access import PersonRequest, person_view

_THEMES = (("", later("System")), ("light", later("Light")), ("dark", later("Dark")))


@require_http_methods(["GET", "HEAD", "POST"])
@person_view
def show(request: PersonRequest) -> HttpResponse:
    """Show the account; a POST saves it."""
    given = {name: getattr(request.user, name) for name in PersonForm.base_fields}
    form = PersonForm(request.POST or None, initial=given)
    if request.method == "POST" and form.is_valid():
        User.objects.filter(pk=request.user.pk).update(**form.cleaned_data)
        messages.success(request, gettext("Saved."))
        return redirect("web:account")
    context = {"form": form, "themes": _THEMES}
    return render(request, "account/profile.html", context, status=422 if form.errors else 200)
