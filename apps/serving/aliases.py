"""Aliases: names that stay while versions change.

They can be moved at once, tested with a canary, and rolled back in one step. An imported alias is the whole name of a
model at another service, such as `ft:gpt-4o-mini-2024-07-18:acme:faq:9aBc`. It names no base model of this
installation, so it can never be the name of a version here. Requests find it within its organization only, and only if
no model has its name.
"""

import datetime
import re
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext

from apps.accounts.members.projects import require_work_in
from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization
from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.models import AdapterVersion
from apps.adapters.operations import CHECKPOINT_MARK
from apps.adapters.queries import get_version_by_name
from apps.catalog.models import BaseModel
from apps.catalog.queries import ModelNotFound
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.locks import lock, lock_row
from apps.core.errors import InvalidState, InvalidValue, NotFound
from apps.serving.models import Alias, Deployment
from apps.serving.placements import request_version
from apps.serving.ready_replicas import answering

_NAME = re.compile(r"[a-z][a-z0-9-]{1,38}[a-z0-9]")
_LIKE_A_VERSION = re.compile(r"[0-9a-hjkmnp-tv-z]{10}")  # the pattern that ends a version's name
# ft:<base>:<organization>:<suffix>:<id>, and the step of a checkpoint; OpenAI leaves the suffix empty where there is
# none.
_IMPORTED = re.compile(
    r"(?=.{1,240}\Z)ft:([A-Za-z0-9][A-Za-z0-9._-]{0,63}):[A-Za-z0-9._-]{0,64}:[A-Za-z0-9._-]{0,64}:[A-Za-z0-9_-]{1,40}"
    r"(?::ckpt-step-[0-9]{1,9})?"
)
_IMPORTED_MARK = "ft:"
MAX_ALIASES = 20  # per adapter, without imported ones
MAX_IMPORTED = 1_000  # per organization


class AliasMoved(InvalidState):
    """The alias is not as the caller saw it: it was moved, deleted or created, or a canary began."""

    code = "alias_moved"


class VersionNotLoaded(InvalidState):
    """No replica has loaded the served version, so requests for it would fail or wait."""

    code = "version_not_loaded"

    def __init__(self, version: AdapterVersion) -> None:
        if version.status == AdapterVersionStatus.FILES_ONLY:
            text = gettext(
                "No replica has loaded this whole model, so requests would fail. Move the alias once its replica has."
            )
        else:
            text = gettext(
                "No replica has loaded this version yet, so requests would fail. It has been asked to load: move the "
                "alias once it is warm."
            )
        super().__init__(text, param="version")
        self.version = version


def list_aliases(*, organization: Organization | str) -> QuerySet[Alias]:
    """Return the aliases that the request sees with their versions, by adapter and name."""
    rows = visible(Alias.objects.for_organization(organization), project="adapter__project").select_related(
        "adapter__base_model", "version", "canary_version", "previous_version"
    )
    return rows.order_by("adapter__name", "name")


def get_alias(*, organization: Organization | str, id: str) -> Alias:
    """Return one alias of the organization. Raises NotFound, the same for unknown and foreign ids."""
    found = list_aliases(organization=organization).filter(pk=id).first()
    if found is None:
        raise NotFound(gettext("There is no alias %(id)s.") % {"id": repr(id)}, param="alias_id")
    return found


def get_exact_version(*, organization: Organization | str, model_name: str, param: str = "model") -> AdapterVersion:
    """Return the version with this name of its own.

    Raises ModelNotFound, and InvalidValue for an alias, with the version that it stands for.
    """
    try:
        return get_version_by_name(organization=organization, model_name=model_name, param=param)
    except ModelNotFound:
        alias = list_aliases(organization=organization).filter(model_name=model_name).first()
        if alias is None:
            raise
    text = gettext(
        "%(alias)s is an alias of %(version)s. Send the name of the version. /api/v1/aliases/%(id)s changes the alias."
    )
    raise InvalidValue(
        text % {"alias": alias.model_name, "version": alias.version.model_name, "id": alias.pk}, param=param
    )


def lock_aliases(*, organization: str) -> None:
    """Let no other transaction move an alias of the organization, or undeploy what one stands for."""
    lock(f"aliases:{organization}")


@contextmanager
def loading_what_is_cold() -> Iterator[None]:
    """Ask for a version that the block refused as VersionNotLoaded, once its transaction was rolled back."""
    try:
        yield
    except VersionNotLoaded as refusal:
        request_version(version=refusal.version, now=db_now())
        raise


@transaction.atomic
def point_alias(
    *,
    version: AdapterVersion,
    name: str,
    by: str,
    now: datetime.datetime,
    canary_percent: int = 0,
    expected: str | None = None,
) -> Alias:
    """Point `name` at the version, or send `canary_percent` of the alias's requests to the version as a canary.

    A new alias takes no canary. The version must be loaded, so that no request fails. An imported alias may move to
    another adapter. `expected` is the name of the version that the alias must stand for, without a canary; "" if it
    must not exist yet, and None for any. Raises InvalidValue, InvalidState, VersionNotLoaded, AliasMoved, and
    PermissionDenied for a viewer of the project.
    """
    if not 0 <= canary_percent <= 99:
        raise InvalidValue(
            gettext("A canary gets 1 to 99 percent. Leave the percentage out to move all requests."),
            param="canary_percent",
        )
    lock_aliases(organization=version.organization_id)  # also against two that create one alias, or pass the limit
    require_work_in(project_id=version.adapter.project_id, actor=by)
    if not _is_deployed(version):
        raise InvalidState(gettext("This version is not served. Serve it first."), param="version")
    aliases = visible(Alias.objects.for_organization(version.organization_id), project="adapter__project")
    of_name = aliases.select_for_update(of=("self",)).filter(name=name)
    alias = (of_name if name.startswith(_IMPORTED_MARK) else of_name.filter(adapter=version.adapter_id)).first()
    if alias is not None and alias.adapter_id != version.adapter_id:
        require_work_in(project_id=alias.adapter.project_id, actor=by)
    _require_expected(alias, expected)
    if alias is None:
        alias = _create(version, name, canary_percent)
    elif canary_percent and alias.adapter_id != version.adapter_id:
        raise InvalidState(
            gettext("A canary is a version of the same adapter. Move the alias instead."), param="version"
        )
    elif canary_percent and alias.version_id != version.pk:
        alias.canary_version, alias.canary_percent = version, canary_percent
    elif not canary_percent:
        if alias.version_id != version.pk:  # one of another project may be hidden from those who see the alias
            is_near = alias.adapter.project_id == version.adapter.project_id
            alias.previous_version = alias.version if is_near else None
        alias.version, alias.canary_version, alias.canary_percent = version, None, 0
    else:
        raise InvalidState(gettext("The alias already stands for this version."), param="version")
    _require_loaded(version)  # last: a refused request loads the version, so all else must be right
    return _save(alias, by=by, now=now, action="alias.moved")


@transaction.atomic
def roll_back(*, alias: Alias, by: str, now: datetime.datetime) -> Alias:
    """End a canary, or return to the previous version.

    Raises InvalidState when neither is possible, NotFound for a deleted alias, and PermissionDenied for a viewer of the
    project.
    """
    require_work_in(project_id=alias.adapter.project_id, actor=by)
    lock_aliases(organization=alias.organization_id)
    alias = lock_row(alias)
    if alias.canary_version_id is not None:
        alias.canary_version, alias.canary_percent = None, 0
    elif alias.previous_version is None or not _is_deployed(alias.previous_version):
        raise InvalidState(
            gettext(
                "There is no earlier version to return to: the alias never moved, or that version is no longer served."
            )
        )
    else:
        alias.version, alias.previous_version = alias.previous_version, alias.version
    return _save(alias, by=by, now=now, action="alias.rolled_back")


@transaction.atomic
def delete_alias(*, alias: Alias, by: str) -> None:
    """Delete the alias: requests for its name get 404. Its versions still answer under their own names.

    Raises PermissionDenied for a viewer of the project.
    """
    require_work_in(project_id=alias.adapter.project_id, actor=by)
    audit.record(
        organization=alias.organization_id, by=by, action="alias.deleted", target=alias.pk, model=alias.model_name
    )
    alias.delete()


def is_imported(alias: Alias) -> bool:
    """Return whether the alias has the whole name of a model at another service.

    Such an alias may move to another adapter.
    """
    return alias.name.startswith(_IMPORTED_MARK)


def require_unaliased(*, version: AdapterVersion) -> None:
    """Raise InvalidState while an alias points at the version; otherwise clear it as an alias's previous version."""
    alias = Alias.objects.filter(Q(version=version) | Q(canary_version=version)).first()
    if alias is not None:
        raise InvalidState(
            gettext("The alias %(name)s stands for this version. Move it to another version or delete it first.")
            % {"name": alias.name},
            param="model",
        )
    Alias.objects.filter(previous_version=version).update(previous_version=None)


def _require_loaded(version: AdapterVersion) -> None:
    """Raise VersionNotLoaded for a version that no replica has loaded, and InvalidState if an engine refused it."""
    if answering().filter(adapter_version=version).exists():
        return
    if version.status == AdapterVersionStatus.REFUSED:
        text = gettext("An engine refused this adapter, so no alias moves to it: %(reason)s")
        raise InvalidState(text % {"reason": version.status_reason}, param="version")
    raise VersionNotLoaded(version)


def _require_expected(alias: Alias | None, expected: str | None) -> None:
    """Raise AliasMoved unless the locked alias is where the caller saw it."""
    if expected is None or (alias is None and not expected):
        return
    if alias is None:
        raise AliasMoved(gettext("The alias no longer exists."), param="expected_version")
    if alias.version.model_name != expected:
        text = gettext("The alias now stands for %(model)s. Compare with that version, and try again.")
        raise AliasMoved(text % {"model": alias.version.model_name}, param="expected_version")
    if alias.canary_version_id is not None:
        text = gettext("A canary of the alias %(name)s has begun. End it or finish it, and try again.")
        raise AliasMoved(text % {"name": alias.name}, param="expected_version")


def _create(version: AdapterVersion, name: str, canary_percent: int) -> Alias:
    if canary_percent:
        raise InvalidValue(
            gettext("This alias doesn't exist yet, so there is no version to compare with."), param="canary_percent"
        )
    model_name = _imported_name(name) if name.startswith(_IMPORTED_MARK) else _own_name(version, name)
    _require_few(version, name)
    if Alias.objects.for_organization(version.organization_id).filter(model_name=model_name).exists():
        raise InvalidState(
            gettext("%(model_name)s is an alias of another adapter of this name.") % {"model_name": model_name},
            param="name",
        )
    return Alias(
        organization_id=version.organization_id,
        adapter_id=version.adapter_id,
        name=name,
        model_name=model_name,
        version=version,
    )


def _require_few(version: AdapterVersion, name: str) -> None:
    """Raise InvalidState if the version's adapter, or of imported names the organization, has no room for a new one."""
    imported = Q(name__startswith=_IMPORTED_MARK)
    if name.startswith(_IMPORTED_MARK):
        own, most = Q(imported, organization=version.organization_id), MAX_IMPORTED
        text = gettext("An organization has at most %(most)s imported names. Delete one first.")
    else:
        own, most = ~imported & Q(adapter=version.adapter_id), MAX_ALIASES
        text = gettext("An adapter has at most %(most)s aliases. Delete one first.")
    if Alias.objects.filter(own).count() >= most:
        raise InvalidState(text % {"most": f"{most:,}"}, param="name")


def _own_name(version: AdapterVersion, name: str) -> str:
    """Return the whole name of a new alias. Raises InvalidValue."""
    if not _NAME.fullmatch(name) or _LIKE_A_VERSION.fullmatch(name):
        raise InvalidValue(
            gettext(
                "An alias has 3 to 40 lower-case letters, digits and hyphens, as in `production`, and does not "
                "look like the end of a version's name."
            ),
            param="name",
        )
    own_name = version.model_name.split(CHECKPOINT_MARK)[0]
    return f"{own_name.rsplit(':', 1)[0]}:{name}"


def _imported_name(name: str) -> str:
    """Return the name if it can only be that of a model at another service. Raises InvalidValue."""
    found = _IMPORTED.fullmatch(name)
    if found is None:
        text = gettext(
            "An imported alias is a model's whole name at another service, ft:<base>:<organization>:<suffix>:<id>."
        )
        raise InvalidValue(text, param="name")
    if BaseModel.objects.filter(name__iexact=found[1]).exists():
        text = gettext(
            "%(name)s is a base model here, so a model may get this name. Choose another name, such as production."
        ) % {"name": found[1]}
        raise InvalidValue(text, param="name")
    return name


def _save(alias: Alias, *, by: str, now: datetime.datetime, action: str) -> Alias:
    alias.moved_at = now
    alias.adapter_id = alias.version.adapter_id
    alias.save()
    audit.record(
        organization=alias.organization_id, by=by, action=action, target=alias.pk, model=alias.model_name,
        version=alias.version_id, canary=alias.canary_version_id, canary_percent=alias.canary_percent,
    )  # fmt: skip
    return alias


def _is_deployed(version: AdapterVersion) -> bool:
    return Deployment.objects.filter(adapter_version=version, removed_at=None).exists()
