"""How a call to Stripe fails, in our words."""

from apps.core.errors import DomainError, Status


class StripeUnavailable(DomainError):
    """Stripe did not answer, or asked for patience. It may have done what was asked: repeat under the same key."""

    code = "payments_unavailable"
    status = Status.UNAVAILABLE
    type = "server_error"
    is_retryable = True


class StripeRefused(DomainError):
    """Stripe understood and will not do it; the same request never succeeds."""

    code = "payment_refused"


class CardDeclined(StripeRefused):
    """The bank said no. `reason` is its code; `authentication_required` means the cardholder must confirm."""

    code = "card_declined"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BadSignature(DomainError):
    """The body was not signed by Stripe with our secret, or too long ago."""

    code = "invalid_signature"
