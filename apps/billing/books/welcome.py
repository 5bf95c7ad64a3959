"""Welcome credit: granted to the first organization that a person founded, once the person's address is confirmed."""

from allauth.account.models import EmailAddress
from django.conf import settings
from django.db import transaction

from apps.accounts.login.addresses import has_verified_address
from apps.accounts.models import Organization, User
from apps.billing.models import WELCOME, CreditLot
from apps.billing.operations import grant_credit
from apps.core.database.tenancy import system


def grant_after_confirmation(*, email_address: EmailAddress, **_: object) -> None:
    """Grant the credit when a person confirms an address. A receiver of allauth's signal."""
    grant_welcome_credit(user=email_address.user)


@transaction.atomic
def grant_welcome_credit(*, user: User) -> None:
    """Grant the installation's welcome credit, at most once per person.

    Nothing is granted to a person without a confirmed address or without an organization of their own.
    """
    amount_nano, reference = settings.WELCOME_CREDIT_NANO, f"{WELCOME}{user.pk}"
    if not amount_nano or not has_verified_address(user=user):
        return
    with system():
        User.objects.select_for_update().get(pk=user.pk)  # two requests at once are one grant
        founded = Organization.objects.filter(founded_by=user).order_by("created_at", "pk").first()
        if founded is None or CreditLot.objects.filter(reference=reference).exists():
            return
        grant_credit(
            organization=founded,
            amount_nano=amount_nano,
            by="system",
            reason="Welcome credit",
            idempotency_key=reference,
            reference=reference,
        )
