"""Weights & Biases and MLflow with the customer's key: stored sealed for the organization, opened for a run's worker.

A job names where to report, never a key. If the key is removed before the job runs, the job runs without the tracker.
"""

import datetime
import re
from collections.abc import Mapping, Sequence

import msgspec
from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.contracts.addresses.customer_servers import check_server
from apps.contracts.runs import Tracker
from apps.core import audit
from apps.core.errors import InvalidValue, MissingParameter, NotFound
from apps.core.ids import new_id
from apps.core.messages.translation import translated
from apps.core.secrets.sealing import place_of, seal, unseal
from apps.finetuning.models import FineTuningJob, TrackerKey
from apps.finetuning.recipes.stored_requests import Integration, TrackerProject, stored_request

NAMES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
_MAX_TAGS, _MAX_NAME, _SHORTEST_KEY, _MAX_KEY = 20, 128, 8, 400
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_HINT = 4


def list_tracker_keys(*, organization: Organization | str) -> list[TrackerKey]:
    return list(TrackerKey.objects.for_organization(organization).order_by("kind"))


@transaction.atomic
def store_tracker_key(
    *, organization: Organization, kind: str, secret: str, url: str, by: str, now: datetime.datetime
) -> TrackerKey:
    """Store the organization's key of a tracker, replacing the previous one. Raises InvalidValue."""
    _require_kind(kind)
    if not _SHORTEST_KEY <= len(secret) <= _MAX_KEY or not _PRINTABLE.fullmatch(secret):
        raise InvalidValue(gettext("A key must have 8 to 400 characters and no spaces."), param="key")
    if kind == "mlflow":
        # Reject an address that cannot be public. The worker checks a name's addresses at each call.
        try:
            check_server(url)
        except ValueError as error:
            raise InvalidValue(translated(str(error)), param="url") from error
    elif url:
        raise InvalidValue(gettext("Only MLflow can use your own server: leave url out."), param="url")
    found = TrackerKey.objects.for_organization(organization).select_for_update().filter(kind=kind).first()
    row = found or TrackerKey(id=new_id("trk"), organization_id=organization.pk, kind=kind)
    row.secret_sealed, row.hint, row.url = seal(secret, place=_place(row)), secret[-_HINT:], url
    row.updated_by, row.updated_at = by, now
    row.save()
    audit.record(organization=organization, by=by, action="tracker_key.stored", target=row.pk, kind=kind, url=url)
    return row


def remove_tracker_key(*, organization: Organization, kind: str, by: str) -> None:
    """Delete a key. Attempts that run keep the copy they got at their claim. Raises NotFound."""
    row = TrackerKey.objects.for_organization(organization).filter(kind=kind).first()
    if row is None:
        raise NotFound(gettext("No key of %(kind)s is stored.") % {"kind": NAMES.get(kind, kind)}, param="kind")
    audit.record(organization=organization, by=by, action="tracker_key.removed", target=row.pk, kind=kind)
    row.delete()


def check_integrations(
    *, organization: Organization | str, asked: Sequence[Mapping[str, object]]
) -> tuple[Integration, ...]:
    """Return a job's `integrations` in the stored form. Raises InvalidValue naming the invalid one."""
    stored = {row.kind for row in list_tracker_keys(organization=organization)} if asked else set()
    kept: list[Integration] = []
    for index, given in enumerate(asked):
        kind, param = given.get("type"), f"integrations[{index}]"
        if kind is None:
            text = gettext("Missing required parameter: '%(param)s.type'. Send it as one of %(offered)s.") % {
                "param": param,
                "offered": _offered(),
            }
            raise MissingParameter(text, param=f"{param}.type")
        kind = _require_kind(kind, param=f"{param}.type")
        if any(one.type == kind for one in kept):
            raise InvalidValue(gettext("%(names)s is named twice.") % {"names": NAMES[kind]}, param=f"{param}.type")
        integration = _integration(given, kind, param)
        if kind not in stored:
            message = gettext(
                "No key of %(names)s is stored: add yours under Tracking or with PUT /api/v1/integrations/%(kind)s."
            ) % {"names": NAMES[kind], "kind": kind}
            raise InvalidValue(message, param=param)
        kept.append(integration)
    return tuple(kept)


def open_trackers(*, job: FineTuningJob) -> tuple[Tracker, ...]:
    """Return the trackers that the job's worker reports to, with opened keys. Never log or show them.

    Raises SealBroken.
    """
    asked = stored_request(job).integrations
    rows = {row.kind: row for row in list_tracker_keys(organization=job.organization_id)} if asked else {}
    found = []
    for given in asked:
        if row := rows.get(given.type):
            chosen = given.project
            found.append(
                Tracker(
                    kind=row.kind,
                    project=chosen.project,
                    name=chosen.name or job.suffix or job.pk,
                    entity=chosen.entity,
                    tags=chosen.tags,
                    url=row.url,
                    secret=unseal(bytes(row.secret_sealed), place=_place(row)),
                )
            )
    return tuple(found)


def _integration(given: Mapping[str, object], kind: str, param: str) -> Integration:
    if unknown := set(given) - {"type", kind}:
        name = min(unknown)[:_MAX_NAME]
        raise InvalidValue(
            gettext("'%(param)s' takes only type and %(kind)s.") % {"param": param, "kind": kind},
            param=f"{param}.{name}",
        )
    try:
        chosen = msgspec.convert(given.get(kind), TrackerProject)
    except msgspec.ValidationError as error:
        text = gettext(
            "'%(param)s.%(kind)s' takes project (a string), and optionally name, entity (strings) and tags (a list)."
        ) % {"param": param, "kind": kind}
        raise InvalidValue(text, param=f"{param}.{kind}") from error
    names = [chosen.project, chosen.name or "-", chosen.entity or "-", *chosen.tags]
    if len(chosen.tags) > _MAX_TAGS or not all(name.strip() and len(name) <= _MAX_NAME for name in names):
        raise InvalidValue(
            gettext("Names have 1 to %(max_name)s characters, and there are up to %(max_tags)s tags.")
            % {"max_name": _MAX_NAME, "max_tags": _MAX_TAGS},
            param=f"{param}.{kind}",
        )
    return Integration(type=kind, **{kind: chosen})


def _require_kind(kind: object, *, param: str = "kind") -> str:
    if not isinstance(kind, str) or kind not in NAMES:
        named = f"'{kind[:60]}'" if isinstance(kind, str) else "This"
        raise InvalidValue(
            gettext("%(named)s is no tracker known here: use %(offered)s.") % {"named": named, "offered": _offered()},
            param=param,
        )
    return kind


def _offered() -> str:
    return ", ".join(f"'{name}'" for name in NAMES)


def _place(row: TrackerKey) -> bytes:
    return place_of(table="finetuning_trackerkey", column="secret_sealed", row_id=row.pk)
