"""E-mail addresses that people have proven to own. Only for processes in which allauth is installed."""

from allauth.account.models import EmailAddress
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.utils.encoding import punycode

from apps.accounts.models import User
from apps.core.errors import InvalidValue


def plain_address(email: str) -> str:
    """Return an address in lower case, with the usual letters in its domain. Raises InvalidValue.

    Mail programs read `x<ada@example.com>`, `"ada"@example.com` and a domain in full-width letters as the same mailbox.
    A domain is kept as it is spelled, in the letters of its language or as `xn--`: accounts are found by it.
    """
    email = email.strip().lower()
    try:
        validate_email(email)
        local, _, domain = email.rpartition("@")
        if '"' in local:
            raise ValidationError(validate_email.message)
        in_letters, in_ascii = spellings_of(domain)
        return f"{local}@{in_ascii if domain.isascii() else in_letters}"
    except (ValidationError, UnicodeError) as error:
        raise InvalidValue(str(validate_email.message), param="email") from error


def spellings_of(domain: str) -> tuple[str, str]:
    """Return a domain in the letters of its language and as `xn--`. Raises UnicodeError if it has no such form."""
    in_ascii = punycode(domain)
    return in_ascii.encode().decode("idna"), in_ascii


def has_verified_address(*, user: User, email: str = "") -> bool:
    """Return whether a person has proven to receive mail at `email`; without `email`, at any of their addresses."""
    verified = EmailAddress.objects.filter(user_id=user.pk, verified=True)
    return (verified.filter(email__iexact=email) if email else verified).exists()


def mark_verified(*, user: User) -> None:
    """Mark a person's login address as verified, because an operator vouches for it or created the account."""
    EmailAddress.objects.update_or_create(user=user, email=user.email, defaults={"verified": True, "primary": True})
