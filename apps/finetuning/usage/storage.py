"""Stored bytes of organizations and members: files, checkpoints, adapters and exports. Billed hourly, and limited."""

import datetime
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from django.db.models import Q
from django.utils.translation import gettext

from apps.accounts.models import ApiKey, Organization, key_of
from apps.accounts.queries import require_home
from apps.accounts.shares import share_of
from apps.batches.lifecycle import INTERNAL_PURPOSE
from apps.billing.usage.storage import record_storage
from apps.core.database.prepared import fetch_prepared
from apps.core.database.tenancy import sum_by_organization
from apps.core.errors import QuotaExceeded
from apps.datasets.queries import KEPT_BY_MAKER, KEPT_PARAMETERS, storage_used_bytes
from apps.finetuning.models import Allowance
from apps.finetuning.usage.quotas import get_quota

_MODEL_BYTES = """
    SELECT organization_id, sum(amount)::bigint FROM (
        SELECT organization_id, bytes AS amount FROM finetuning_checkpoint
        WHERE organization_id = ANY(%(organizations)s) AND deleted_at IS NULL AND quarantined_at IS NULL
        UNION ALL
        SELECT organization_id, bytes + export_bytes AS amount FROM adapters_adapterversion
        WHERE organization_id = ANY(%(organizations)s) AND deleted_at IS NULL
        UNION ALL
        SELECT organization_id, bytes AS amount FROM batches_batchfile
        WHERE organization_id = ANY(%(organizations)s) AND deleted_at IS NULL
        UNION ALL
        SELECT organization_id, bytes AS amount FROM completions_storedcompletion
        WHERE organization_id = ANY(%(organizations)s)
        UNION ALL
        SELECT organization_id, bytes AS amount FROM evals_eval
        WHERE organization_id = ANY(%(organizations)s)
        UNION ALL
        SELECT organization_id, bytes AS amount FROM evals_evalrun
        WHERE organization_id = ANY(%(organizations)s)
        UNION ALL
        SELECT organization_id, bytes AS amount FROM evals_evalitem
        WHERE organization_id = ANY(%(organizations)s)
    ) AS kept GROUP BY organization_id
"""
_OF_MEMBERS = f"""
    WITH made AS (
        {KEPT_BY_MAKER}
        UNION ALL
        SELECT job.member_id, checkpoint.created_at, checkpoint.bytes
        FROM finetuning_checkpoint checkpoint JOIN finetuning_finetuningjob job ON job.id = checkpoint.job_id
        WHERE checkpoint.organization_id = ANY(%(organizations)s)
            AND checkpoint.deleted_at IS NULL AND checkpoint.quarantined_at IS NULL
        UNION ALL
        SELECT coalesce(job.member_id, version.source), version.created_at, version.bytes + version.export_bytes
        FROM adapters_adapterversion version
        LEFT JOIN finetuning_run run ON run.id = version.source
        LEFT JOIN finetuning_checkpoint origin ON origin.id = version.source
        LEFT JOIN finetuning_finetuningjob job ON job.id = coalesce(run.job_id, origin.job_id)
        WHERE version.organization_id = ANY(%(organizations)s) AND version.deleted_at IS NULL
        UNION ALL
        SELECT created_by, created_at, bytes FROM batches_batchfile
        WHERE organization_id = ANY(%(organizations)s) AND deleted_at IS NULL AND purpose <> %(internal)s
    )
    SELECT coalesce(key.created_by_id, made.maker), sum(made.amount)::bigint,
        coalesce(sum(made.amount) FILTER (WHERE made.created_at >= %(begin)s::timestamptz), 0)::bigint
    FROM made LEFT JOIN accounts_apikey key ON key.id = made.maker GROUP BY 1
"""  # noqa: S608 - constants


@dataclass(frozen=True)
class MemberStorage:
    """The bytes that a member stores, and those of them that it stored recently."""

    bytes: int = 0
    recent_bytes: int = 0


def stored_bytes(*, organizations: Collection[str], but_upload: str = "") -> Counter[str]:
    """Return the bytes of each organization's files, checkpoints, adapters and exports; `but_upload` is left out."""
    stored = storage_used_bytes(organizations=organizations, but_upload=but_upload)
    stored.update(sum_by_organization(_MODEL_BYTES, organizations=list(organizations)))
    return stored


def counted_bytes(*, organization: Organization | str, but_upload: str = "") -> int:
    """Return the bytes that count against the limit, with those of organizations that share it."""
    with share_of(organization) as organizations:
        return stored_bytes(organizations=organizations, but_upload=but_upload).total()


def left_bytes(*, organization: Organization | str, but_upload: str = "") -> int | None:
    """Return the bytes the organization may still store; None if it has no limit.

    Raises RegionRefused if its files may not be in the region of the object store.
    """
    require_home(organization=organization)
    limit = get_quota(organization=organization).storage_bytes
    return None if limit is None else max(0, limit - counted_bytes(organization=organization, but_upload=but_upload))


def storage_of_members(
    *, organization: Organization | str, begin: datetime.datetime | None = None, but_upload: str = ""
) -> dict[str, MemberStorage]:
    """Return by id what each member stores: files, uploads, and the checkpoints, adapters and exports of its jobs.

    `begin` is the begin of the recent time; without it, nothing counts as recent.
    """
    known = {
        "organizations": [key_of(organization)],
        "but_upload": but_upload,
        "begin": begin,
        "internal": INTERNAL_PURPOSE,
        **KEPT_PARAMETERS,
    }
    return {member: MemberStorage(*of_member) for member, *of_member in fetch_prepared(_OF_MEMBERS, known)}


def left_of_member(*, organization: Organization | str, by: str, but_upload: str = "") -> int | None:
    """Return the bytes that the member behind `by` may still store; None if it has no allowance of storage.

    `by` is the member's user or one of its keys.
    """
    keys = ApiKey.objects.filter(pk=by).values("created_by_id")
    allowed = Allowance.objects.for_organization(organization).exclude(storage_bytes=None)
    allowance = allowed.filter(Q(member_id=by) | Q(member_id__in=keys)).first()
    if allowance is None or allowance.storage_bytes is None:
        return None
    stored = storage_of_members(organization=organization, but_upload=but_upload)
    return max(0, allowance.storage_bytes - stored.get(allowance.member_id or "", MemberStorage()).bytes)


def require_any_storage(*, organization: Organization | str, by: str) -> None:
    """Raise QuotaExceeded if nothing more may be stored, because a job's result would have no room.

    The result counts as stored by the member `by`. Raises RegionRefused as `left_bytes` does. The size of the result is
    known only at the end. It is then kept, even above the limit.
    """
    if left_bytes(organization=organization) == 0:
        raise QuotaExceeded(
            gettext(
                "Your organization's storage is full, so there is no room for what the job makes: delete files "
                "or models you no longer need, or ask the operator for more."
            )
        )
    if left_of_member(organization=organization, by=by) == 0:
        raise QuotaExceeded(
            gettext(
                "The storage that your organization allows the job's member is full, so there is no room for what the "
                "job makes: delete files or models of this member, or ask an owner for more."
            )
        )


def sample_storage(*, now: datetime.datetime) -> int:
    """Record the hour's sample of every organization that has none; return the number added. Safe to repeat.

    A suspended organization cannot delete anything, so its storage is not charged while it is suspended.
    """
    organizations = Organization.objects.filter(suspended_at=None).order_by("pk")
    stored = stored_bytes(organizations=[each.pk for each in organizations])
    return sum(record_storage(organization=each, byte_count=stored[each.pk], at=now) for each in organizations)
