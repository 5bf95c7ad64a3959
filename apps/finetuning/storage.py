"""What each organization keeps, sampled for billing: files, checkpoints and adapters."""

import datetime
from typing import Any

from django.db.models import Sum

from apps.accounts.models import Organization
from apps.adapters.models import AdapterVersion
from apps.billing.metered import record_storage
from apps.datasets.queries import storage_used_bytes
from apps.finetuning.models import Checkpoint


def stored_bytes(*, organization: Any) -> int:
    """Return the bytes that files, kept checkpoints and adapters occupy now."""
    checkpoints = Checkpoint.objects.for_organization(organization).filter(deleted_at=None)
    adapters = AdapterVersion.objects.for_organization(organization).filter(deleted_at=None)
    return (
        storage_used_bytes(organization=organization)
        + (checkpoints.aggregate(total=Sum("bytes"))["total"] or 0)
        + (adapters.aggregate(total=Sum("bytes"))["total"] or 0)
    )


def sample_storage(*, now: datetime.datetime) -> int:
    """Record the hour's sample of every organization that has none; return how many were added. Safe to repeat."""
    return sum(
        record_storage(organization=each, byte_count=stored_bytes(organization=each), at=now)
        for each in Organization.objects.order_by("pk")
    )
