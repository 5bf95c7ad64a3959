"""Errors of a call to Stripe."""

from apps.core.errors import DomainError, Status


class StripeUnavailable(DomainError):
    """Stripe did not answer, or limited the rate. It may have done the work: repeat under the same key."""

    code = "payments_unavailable"
    status = Status.UNAVAILABLE
    type = "server_error"
    is_retryable = True


class StripeRefused(DomainError):
    """Stripe understood and refused; the same request never succeeds."""

    code = "payment_refused"


class CardDeclined(StripeRefused):
    """The bank declined. `reason` is its code; `authentication_required` means the cardholder must confirm."""

    code = "card_declined"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BadSignature(DomainError):
    """Stripe did not sign the body with our secret, or signed it too long ago."""

    code = "invalid_signature"
