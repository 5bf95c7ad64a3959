"""A secret that a POST creates. The page after the redirect shows it once, so that a reload creates no second one."""

import base64

from django.http import HttpRequest

from apps.core.objects.page_tables import asked_table
from apps.core.secrets.sealing import SealBroken, place_of, seal, unseal


def keep_secret(request: HttpRequest, name: str, *, owner: str, secret: str) -> None:
    """Keep the secret of `owner`, sealed, in the session under `name`."""
    sealed = seal(secret, place=_place(name, owner))
    request.session[name] = {"owner": owner, "sealed": base64.b64encode(sealed).decode()}


def take_secret(request: HttpRequest, name: str, *, owner: str = "") -> tuple[str, str] | None:
    """Return the stored owner and secret, only once and only for the GET of a page.

    With `owner`, return only that owner's.
    """
    is_page = request.method == "GET" and not asked_table(request)
    is_shown = is_page and not hasattr(request, "viewing")  # never beside the pages of others
    kept = request.session.get(name) if is_shown else None
    if kept is None or owner not in ("", kept["owner"]):
        return None
    del request.session[name]
    try:
        return kept["owner"], unseal(base64.b64decode(kept["sealed"]), place=_place(name, kept["owner"]))
    except SealBroken:  # the installation's secret key was changed meanwhile
        return None


def _place(name: str, owner: str) -> bytes:
    return place_of(table="django_session", column=name, row_id=owner)
