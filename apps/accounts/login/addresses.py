"""E-mail addresses that people have proven to own. Only for processes in which allauth is installed."""

from allauth.account.models import EmailAddress

from apps.accounts.models import User


def has_verified_address(*, user: User, email: str = "") -> bool:
    """Return whether a person has proven to receive mail at `email`; without `email`, at any of their addresses."""
    verified = EmailAddress.objects.filter(user_id=user.pk, verified=True)
    return (verified.filter(email__iexact=email) if email else verified).exists()


def mark_verified(*, user: User) -> None:
    """Mark a person's login address as verified, because an operator vouches for it or created the account."""
    EmailAddress.objects.update_or_create(user=user, email=user.email, defaults={"verified": True, "primary": True})
