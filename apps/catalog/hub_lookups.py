"""Lookups of hub repositories, and the installation of the models found.

An operator names a repository. The hub is read in the background, because web processes have no way out. The operator
sees the result, and installs exactly that commit.
"""

import datetime
import re
import tempfile
from pathlib import Path

import msgspec
from django.db import transaction
from django.db.models import F, Q
from django.utils.translation import gettext

from apps.catalog.model_files import read_hub_folder, require_repository
from apps.catalog.models import BaseModel, HubLookup
from apps.catalog.operations import UNKNOWN_CONTEXT_TOKENS, add_base_model
from apps.catalog.queries import open_hub_token
from apps.core import audit
from apps.core.errors import DomainError, InvalidState
from apps.core.messages import outbox
from apps.core.secrets.sealing import place_of, seal, unseal

_KEPT = datetime.timedelta(days=30)
_CHECK_EVERY = datetime.timedelta(days=1)
_CHECKS_AT_ONCE = 5  # a slow hub delays the control tasks of this process


@transaction.atomic
def request_lookup(*, repo: str, by: str, now: datetime.datetime, revision: str = "", hub_token: str = "") -> HubLookup:
    """Ask the hub about a repository, at a commit or at its newest one.

    Without a token, that of a base model from the same repository is used. Raises InvalidValue for an invalid
    repository or commit.
    """
    require_repository(repo, revision)
    HubLookup.objects.filter(requested_at__lt=now - _KEPT).delete()
    lookup = HubLookup(repo=repo, revision=revision, requested_by=by, requested_at=now)
    if token := hub_token or _known_token(repo):
        lookup.token_sealed = seal(token, place=_token_place(lookup))
    lookup.save()
    outbox.publish(topic="base_model.lookup", key=f"lookup:{lookup.pk}", payload={"lookup_id": lookup.pk})
    audit.record(organization=None, by=by, action="base_model.looked_up", target=lookup.pk, repo=repo)
    return lookup


def look_up(*, lookup: HubLookup, now: datetime.datetime) -> None:
    """Read the repository from the hub, and store its description or the reason why it cannot be installed.

    Safe to repeat.
    """
    if lookup.answered_at:
        return
    from apps.catalog.hub import read_repository  # noqa: PLC0415 - slow to import, and seldom used

    with tempfile.TemporaryDirectory(prefix="anneal-hub-") as place:
        folder = Path(place)
        try:
            found = read_repository(repo=lookup.repo, revision=lookup.revision, token=_open_token(lookup), into=folder)
            lookup.repository = msgspec.to_builtins(found)
            read = read_hub_folder(folder, weights_sha256=found.weights_sha256)
            lookup.model = {
                "config": read.config,
                "parameter_count": read.parameter_count,
                "context_length": read.architecture.max_position_embeddings or UNKNOWN_CONTEXT_TOKENS,
            }
        except DomainError as refused:
            lookup.refusal = refused.message[:500]
    lookup.answered_at = now
    lookup.save()


@transaction.atomic
def install_found(*, lookup: HubLookup, name: str, by: str, now: datetime.datetime) -> BaseModel:
    """Add what the lookup found as a base model, and request its installation.

    Raises InvalidState if there is nothing to install, InvalidValue if the name is taken or malformed.
    """
    lookup = HubLookup.objects.select_for_update().get(pk=lookup.pk)
    if lookup.base_model_id or lookup.model is None or lookup.repository is None:
        raise InvalidState(
            gettext("Only a repository that the hub described can be installed, and once."), param="repo"
        )
    found = lookup.repository
    row = add_base_model(
        name=name,
        display_name=found["repo"].rpartition("/")[2][:120],
        repo=found["repo"],
        revision=found["revision"],
        config=lookup.model["config"],
        hub_token=_open_token(lookup) or "",
        licence=found["licence"],
        is_gated=found["is_gated"],
        by=by,
        now=now,
    )
    lookup.base_model, lookup.token_sealed = row, None  # the base model keeps the token
    lookup.save(update_fields=["base_model", "token_sealed"])
    return row


def find_installed(*, lookup: HubLookup) -> BaseModel | None:
    """Return the base model with this repository, preferably at this commit."""
    if lookup.repository is None:
        return None
    same = BaseModel.objects.filter(repo=lookup.repository["repo"], is_installed=True, retired_at=None)
    found = list(same.order_by("-created_at")[:20])
    return next((row for row in found if row.revision == lookup.repository["revision"]), found[0] if found else None)


def propose_name(*, lookup: HubLookup) -> str:
    """Return a free name for the model: that of its listed row, the repository's name, or that name with the commit."""
    repository = lookup.repository or {"repo": lookup.repo, "revision": ""}
    listed = BaseModel.objects.filter(repo=repository["repo"], is_installed=False, retired_at=None).first()
    if listed:
        return listed.name
    plain = re.sub(r"[^a-z0-9.]+", "-", repository["repo"].rpartition("/")[2].lower()).strip("-.")[:70].strip("-.")
    plain = re.sub(r"[.-]{2,}", "-", plain)
    taken = BaseModel.objects.filter(name=plain).filter(Q(is_installed=True) | Q(retired_at__isnull=False)).exists()
    return f"{plain}-{repository['revision'][:7]}" if taken else plain


def check_revisions(*, now: datetime.datetime) -> None:
    """Ask the hub for the newest commits of a few models that were not checked for a day."""
    from apps.catalog.hub import find_newest_revision  # noqa: PLC0415 - slow to import, and seldom used

    due = Q(revision_checked_at=None) | Q(revision_checked_at__lt=now - _CHECK_EVERY)
    rows = BaseModel.objects.filter(due, is_installed=True, retired_at=None).exclude(repo="").exclude(revision="")
    for row in rows.order_by(F("revision_checked_at").asc(nulls_first=True))[:_CHECKS_AT_ONCE]:
        # Stored before the request: a model that fails here must not keep the others from their turn.
        BaseModel.objects.filter(pk=row.pk).update(revision_checked_at=now)
        if newest := find_newest_revision(repo=row.repo, token=open_hub_token(base_model=row)):
            BaseModel.objects.filter(pk=row.pk).update(newer_revision="" if newest == row.revision else newest)


def _known_token(repo: str) -> str | None:
    known = BaseModel.objects.filter(repo=repo, hub_token__isnull=False).first()
    return open_hub_token(base_model=known) if known else None


def _token_place(lookup: HubLookup) -> bytes:
    return place_of(table="catalog_hublookup", column="token_sealed", row_id=lookup.pk)


def _open_token(lookup: HubLookup) -> str | None:
    return unseal(bytes(lookup.token_sealed), place=_token_place(lookup)) if lookup.token_sealed else None
