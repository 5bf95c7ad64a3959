"""Pushes of finished models to customers' own repositories on the operator's hub.

The control plane sends the files, never a GPU box: the customer's token does not leave it. The token is given for one
push, sealed until the push has ended, and then erased. The hub's address is the operator's setting.
"""

import datetime
import hashlib
import logging
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext, gettext_noop

from apps.accounts.members.projects import require_work_in
from apps.accounts.models import Organization
from apps.accounts.queries import RegionRefused, regions_of
from apps.accounts.shares import get_share_holder, share_of
from apps.adapters.models import AdapterVersion
from apps.catalog.model_files import require_repository
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.database.transitions import advance, try_advance
from apps.core.errors import DomainError, InvalidState, InvalidValue, QuotaExceeded, RateLimited, Unavailable
from apps.core.messages import outbox
from apps.core.objects.store import ObjectMissing, store
from apps.core.secrets.sealing import place_of, seal, unseal
from apps.finetuning.lifecycle import CONVERSION_OPEN, CONVERSION_TRANSITIONS, ConversionStatus
from apps.finetuning.models import HubPush, HubPushToken
from apps.finetuning.results.model_files import ModelFile, list_files

logger = logging.getLogger(__name__)

MAX_BYTES = 8 * 1024**3  # of one push: it lies on the control plane's disk while it is sent
SMALL_BYTES = 512 * 1024**2  # a larger one is sent beside, so that adapters do not wait for whole models
MAX_OPEN, MAX_A_DAY = 2, 20  # of an organization, together with those that share with it
MAX_ATTEMPTS = 3
_A_DAY = datetime.timedelta(days=1)
_FOLDER, _LEFT_SECONDS = "anneal-push-", 2 * 3_600
_TOKEN = re.compile(r"[\x21-\x7e]{8,400}")
_DELETED = gettext_noop("The model was deleted.")
_SUSPENDED = gettext_noop("Your organization is suspended.")
_LIMITED = gettext_noop("Your organization is limited to regions now, and the hub is in none.")
_LATE = gettext_noop("The push did not end within a day.")
_STOPPED = gettext_noop("The push was interrupted too often.")
_GONE = gettext_noop("A file of the model cannot be read.")


def list_pushes(*, version: AdapterVersion) -> QuerySet[HubPush]:
    """Return the pushes of a version, newest first."""
    rows = HubPush.objects.for_organization(version.organization_id).filter(version=version)
    return rows.order_by("-created_at", "-pk")


@transaction.atomic
def request_push(
    *, version: AdapterVersion, export: str, repository: str, token: str, by: str, now: datetime.datetime
) -> HubPush:
    """Accept a push of the version's files, or of one of its exports; an open one to the same place is returned.

    Raises InvalidValue, InvalidState where pushes are off, RegionRefused for an organization that is limited to
    regions, NotFound, RateLimited, QuotaExceeded, and PermissionDenied for a viewer of the model's project.
    """
    require_work_in(project_id=version.adapter.project_id, actor=by)
    if not settings.HUB_PUSHES:
        text = gettext("This installation does not push to a hub. Download the files, and send them with `hf upload`.")
        raise InvalidState(text, code="push_unavailable")
    if regions := regions_of(organization=version.organization):
        text = gettext("Your organization is limited to %(regions)s, and the hub is in no region. Download the files.")
        raise RegionRefused(text % {"regions": ", ".join(regions)}, param="repository")
    try:
        require_repository(repository, "")
    except InvalidValue as refused:
        raise InvalidValue(refused.message, param="repository") from None
    if not _TOKEN.fullmatch(token):
        raise InvalidValue(gettext("A token of the hub has 8 to 400 characters and no spaces."), param="token")
    size = sum(file.bytes for file in _files(version, export))
    if size > MAX_BYTES:
        text = gettext(
            "A push has up to %(most)s GiB, and this is larger. Download it with `anneal models pull`, and send it "
            "with `hf upload`."
        )
        raise QuotaExceeded(text % {"most": MAX_BYTES // 1024**3}, param="export")
    lock(f"pushes:{get_share_holder(organization=version.organization_id)}")
    mine = list_pushes(version=version).filter(export=export, repository=repository, status__in=CONVERSION_OPEN)
    if found := mine.first():
        return found
    _require_room(version.organization, now)
    push = HubPush(
        organization=version.organization, version=version, export=export, repository=repository, created_by=by,
        created_at=now,
    )  # fmt: skip
    push.save(force_insert=True)
    HubPushToken(push=push, token_sealed=seal(token, place=_place(push))).save(force_insert=True)
    outbox.publish(
        topic="hub.push" if size <= SMALL_BYTES else "hub.push_large", key=f"push:{push.pk}",
        payload={"push_id": push.pk}, organization=version.organization_id,
    )  # fmt: skip
    audit.record(
        organization=version.organization_id, by=by, action="adapter.push_requested", target=version.pk,
        repository=repository, export=export,
    )  # fmt: skip
    return push


def send(*, push_id: str) -> None:
    """Send one push. Safe to repeat. Raises Unavailable if another attempt may succeed."""
    push = _begin(push_id)
    if push is None:
        return
    from apps.catalog.hub_uploads import push_folder  # noqa: PLC0415 - slow to import, and seldom used

    version = AdapterVersion.objects.select_related("adapter__base_model").get(pk=push.version_id)
    token = unseal(bytes(HubPushToken.objects.get(push=push).token_sealed), place=_place(push))
    _delete_left()
    try:
        with tempfile.TemporaryDirectory(prefix=_FOLDER) as place:
            _write(_files(version, push.export), Path(place))
            commit = push_folder(
                repo=push.repository, folder=Path(place), token=token, message=f"Add {version.model_name}"
            )
    except Unavailable as error:
        if push.attempts >= MAX_ATTEMPTS:
            _end(push, ConversionStatus.FAILED, problem=error.message)
            return
        try_advance(push, to=ConversionStatus.WAITING, transitions=CONVERSION_TRANSITIONS, problem=error.message[:300])
        raise
    except ObjectMissing:
        _end(push, ConversionStatus.FAILED, problem=_GONE)
    except DomainError as refused:
        _end(push, ConversionStatus.FAILED, problem=refused.message)
    else:
        _end(push, ConversionStatus.SUCCEEDED, commit=commit)


def _delete_left() -> None:
    """Delete the files of attempts whose process was killed: no attempt takes as long as these are old."""
    before = time.time() - _LEFT_SECONDS
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(FileNotFoundError):  # another push has ended meanwhile
            if folder.lstat().st_mtime < before:
                shutil.rmtree(folder, ignore_errors=True)


def end_overdue(*, now: datetime.datetime) -> int:
    """End the pushes that are a day old, so that no token is kept longer; return how many."""
    late = list(HubPush.objects.filter(ended_at=None, created_at__lt=now - _A_DAY)[:100])
    for push in late:
        _end(push, ConversionStatus.FAILED, problem=push.problem or _LATE)
    return len(late)


@transaction.atomic
def _begin(push_id: str) -> HubPush | None:
    """Begin an attempt; return None if there is nothing left to do."""
    push = HubPush.objects.select_for_update().filter(pk=push_id, status__in=CONVERSION_OPEN).first()
    if push is None:
        return None
    problem = ""
    if AdapterVersion.objects.filter(pk=push.version_id, deleted_at__isnull=False).exists():
        problem = _DELETED
    elif Organization.objects.filter(pk=push.organization_id, suspended_at__isnull=False).exists():
        problem = _SUSPENDED
    elif regions_of(organization=push.organization_id) is not None:
        problem = _LIMITED
    elif push.attempts >= MAX_ATTEMPTS:
        problem = _STOPPED
    if problem:
        _end(push, ConversionStatus.FAILED, problem=problem)
        return None
    if push.status == ConversionStatus.RUNNING:  # its process was killed
        advance(push, to=ConversionStatus.WAITING, transitions=CONVERSION_TRANSITIONS)
    advance(push, to=ConversionStatus.RUNNING, transitions=CONVERSION_TRANSITIONS, attempts=push.attempts + 1)
    return push


@transaction.atomic
def _end(push: HubPush, status: ConversionStatus, *, problem: str = "", commit: str = "") -> None:
    """End the push, unless it has ended: `end_overdue` may come while its files are sent."""
    if not try_advance(
        push, to=status, transitions=CONVERSION_TRANSITIONS, ended_at=db_now(), problem=problem[:300],
        commit=commit[:64],
    ):  # fmt: skip
        return
    HubPushToken.objects.filter(push=push).delete()
    audit.record(
        organization=push.organization_id, by="system", action=f"adapter.push_{status}", target=push.version_id,
        repository=push.repository, commit=commit,
    )  # fmt: skip


def _require_room(organization: Organization, now: datetime.datetime) -> None:
    with share_of(organization) as organizations:
        rows = HubPush.objects.filter(organization__in=organizations)
        if rows.filter(created_at__gt=now - _A_DAY).count() >= MAX_A_DAY:
            text = gettext("An organization can push at most %(max_a_day)s times a day. Try again tomorrow.")
            raise RateLimited(text % {"max_a_day": MAX_A_DAY}, retry_after_seconds=3600)
        if rows.filter(status__in=CONVERSION_OPEN).count() >= MAX_OPEN:
            text = gettext(
                "Your organization has %(max_open)s open pushes, the most allowed. Wait until one has ended."
            )
            raise RateLimited(text % {"max_open": MAX_OPEN}, retry_after_seconds=60)


def _files(version: AdapterVersion, export: str) -> list[ModelFile]:
    found = [file for file in list_files(version=version) if file.export == export]
    if not found:
        kinds = ", ".join(sorted({each["kind"] for each in version.exports})) or "-"
        text = gettext("This model has no export of this name. It has: %(kinds)s.")
        raise InvalidValue(text % {"kinds": kinds}, param="export")
    return found


def _write(files: list[ModelFile], folder: Path) -> None:
    """Write the files into the folder. Raises ObjectMissing, and Unavailable for one with another hash."""
    for file in files:
        digest = hashlib.sha256()
        with (folder / file.name).open("wb") as target:
            if not file.key:
                target.write(file.text.encode())
                continue
            with store().open_stream(file.key) as stream:
                while chunk := stream.read(1024**2):
                    digest.update(chunk)
                    target.write(chunk)
        if digest.hexdigest() != file.sha256:
            raise Unavailable(_GONE, code="hub_unavailable")


def _place(push: HubPush) -> bytes:
    return place_of(table=HubPushToken._meta.db_table, column="token_sealed", row_id=push.pk)
