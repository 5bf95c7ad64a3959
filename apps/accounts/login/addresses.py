"""E-mail addresses that people have proven to own. Only for processes in which allauth is installed."""

from allauth.account.models import EmailAddress
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.utils.encoding import punycode

from apps.accounts.models import User
from apps.core.errors import InvalidValue


def plain_address(email: str) -> str:
    """Return the one spelling of an address under which its mails are counted. Raises InvalidValue.

    Mail programs read `x<ada@example.com>`, `"ada"@example.com` and a domain in full-width letters as the same mailbox.
    """
    email = email.strip().lower()
    try:
        validate_email(email)
        local, _, domain = email.rpartition("@")
        if '"' in local:
            raise ValidationError(validate_email.message)
        return f"{local}@{punycode(domain).encode().decode('idna')}"
    except (ValidationError, UnicodeError) as error:
        raise InvalidValue(str(validate_email.message), param="email") from error


def has_verified_address(*, user: User, email: str = "") -> bool:
    """Return whether a person has proven to receive mail at `email`; without `email`, at any of their addresses."""
    verified = EmailAddress.objects.filter(user_id=user.pk, verified=True)
    return (verified.filter(email__iexact=email) if email else verified).exists()


def mark_verified(*, user: User) -> None:
    """Mark a person's login address as verified, because an operator vouches for it or created the account."""
    EmailAddress.objects.update_or_create(user=user, email=user.email, defaults={"verified": True, "primary": True})
