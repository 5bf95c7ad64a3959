"""An organization's billing profile: addressee, the label that splits its invoices, and the daily report."""

import datetime
from typing import TypedDict, Unpack

from django.db import transaction

from apps.accounts.models import Organization, key_of
from apps.billing.models import BillingProfile
from apps.core import audit


def get_profile(*, organization: Organization | str) -> BillingProfile:
    """Return the organization's profile, or an unsaved default one."""
    organization_id = key_of(organization)
    found = BillingProfile.objects.filter(organization_id=organization_id).first()
    return found or BillingProfile(organization_id=organization_id)


class ProfileValues(TypedDict, total=False):
    legal_name: str
    address: str
    chargeback_label: str
    is_daily_report_wanted: bool


@transaction.atomic
def set_profile(
    *, organization: Organization | str, by: str, now: datetime.datetime, **values: Unpack[ProfileValues]
) -> BillingProfile:
    """Set the given values. Issued invoices do not change."""
    organization_id = key_of(organization)
    profile, _ = BillingProfile.objects.update_or_create(
        organization_id=organization_id, defaults={**values, "updated_at": now}
    )
    audit.record(organization=organization_id, by=by, action="billing_profile.set", target=profile.pk)
    return profile
