"""E-mail addresses that people have shown to be theirs. Only for processes in which allauth is installed."""

from allauth.account.models import EmailAddress

from apps.accounts.models import User


def has_verified_address(*, user: User, email: str = "") -> bool:
    """Tell whether a person has shown that mail to `email`, or to any address of theirs, reaches them."""
    verified = EmailAddress.objects.filter(user_id=user.pk, verified=True)
    return (verified.filter(email__iexact=email) if email else verified).exists()


def mark_verified(*, user: User) -> None:
    """Take the login address of a person as verified, because an operator vouches for it or made the account."""
    EmailAddress.objects.update_or_create(user=user, email=user.email, defaults={"verified": True, "primary": True})
