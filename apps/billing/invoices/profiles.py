"""An organization's billing profile: addressee, the label that splits its invoices, and the daily report."""

import datetime
from typing import Any

from django.db import transaction

from apps.billing.models import BillingProfile
from apps.core import audit


def get_profile(*, organization: Any) -> BillingProfile:
    """Return the organization's profile, or an unsaved default one."""
    organization_id = getattr(organization, "pk", organization)
    found = BillingProfile.objects.filter(organization_id=organization_id).first()
    return found or BillingProfile(organization_id=organization_id)


@transaction.atomic
def set_profile(*, organization: Any, by: str, now: datetime.datetime, **values: Any) -> BillingProfile:
    """Set legal_name, address, chargeback_label and is_daily_report_wanted. Issued invoices do not change."""
    organization_id = getattr(organization, "pk", organization)
    profile, _ = BillingProfile.objects.update_or_create(
        organization_id=organization_id, defaults=values | {"updated_at": now}
    )
    audit.record(organization=organization_id, by=by, action="billing_profile.set", target=profile.pk)
    return profile
