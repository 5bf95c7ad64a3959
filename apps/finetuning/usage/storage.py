"""Stored bytes of each organization: files, checkpoints, adapters and exports. Billed by the hour, and limited."""

import datetime
from collections import Counter
from collections.abc import Collection

from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.accounts.queries import require_home
from apps.accounts.shares import share_of
from apps.billing.usage.storage import record_storage
from apps.core.database.tenancy import sum_by_organization
from apps.core.errors import QuotaExceeded
from apps.datasets.queries import storage_used_bytes
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


def require_any_storage(*, organization: Organization | str) -> None:
    """Raise QuotaExceeded if nothing more may be stored, because a job's result would have no room.

    Raises RegionRefused as `left_bytes` does. The size of the result is known only at the end. It is then kept, even
    above the limit.
    """
    if left_bytes(organization=organization) == 0:
        raise QuotaExceeded(
            gettext(
                "Your organization's storage is full, so there is no room for what the job makes: delete files "
                "or models you no longer need, or ask the operator for more."
            )
        )


def sample_storage(*, now: datetime.datetime) -> int:
    """Record the hour's sample of every organization that has none; return the number added. Safe to repeat.

    A suspended organization cannot delete anything, so its storage is not charged while it is suspended.
    """
    organizations = Organization.objects.filter(suspended_at=None).order_by("pk")
    stored = stored_bytes(organizations=[each.pk for each in organizations])
    return sum(record_storage(organization=each, byte_count=stored[each.pk], at=now) for each in organizations)
