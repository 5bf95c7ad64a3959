"""Money as integer nano-USD (1e-9 USD): exact for a single token's price; a bigint holds 9.2e9 USD."""

import re
from decimal import Decimal

NANO_PER_USD = 1_000_000_000
NANO_PER_CENT = 10_000_000
LARGEST_USD = 9_000_000_000
_AMOUNT = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")  # Decimal reads "1_0" and digits of every script as well


def rated(*, quantity: int, price_nano: int, per: int) -> int:
    """Return the price of `quantity` units at `price_nano` per `per` units, rounded half up to the nano.

    Call it on cumulative quantities and post the difference, so that rounding errors never add up.
    """
    if quantity < 0 or price_nano < 0 or per <= 0:
        raise ValueError("quantity and price must not be negative, per must be positive")
    return (2 * quantity * price_nano + per) // (2 * per)


def usd_to_nano(usd: Decimal) -> int:
    """Return the exact nano amount. Raises ValueError for more than nine decimals or more than LARGEST_USD."""
    if not usd.is_finite() or usd.copy_abs() > LARGEST_USD:
        raise ValueError(f"an amount is at most {LARGEST_USD} dollars")
    nano = usd * NANO_PER_USD
    if nano != nano.to_integral_value():
        raise ValueError("an amount has at most nine decimals")
    return int(nano)


def parse_usd(text: str) -> int:
    """Return the exact nano amount of a plain decimal number, such as 2.50. Raises ValueError."""
    if not _AMOUNT.fullmatch(text):
        raise ValueError("an amount is a plain decimal number")
    return usd_to_nano(Decimal(text))


def nano_to_usd(nano: int) -> Decimal:
    return Decimal(nano) / NANO_PER_USD


def usd_decimal(nano: int) -> str:
    """Return the exact amount for an API: plain decimal digits, such as 0.0000001, never an exponent."""
    return f"{nano_to_usd(nano).normalize():f}"


def dollars(nano: int) -> str:
    """Return the exact amount for a message, with at least two decimals: $2.50, -$0.07, $0.0000001.

    A rounded amount in a message could be too little to act on, or look like zero.
    """
    amount = nano_to_usd(abs(nano)).normalize()
    places = max(2, -int(amount.as_tuple().exponent))
    return f"{'-' if nano < 0 else ''}${amount:,.{places}f}"
