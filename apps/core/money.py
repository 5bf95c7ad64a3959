"""Money is integer nano-USD (1e-9 USD): exact for a single token's price, 9.2e9 USD in a bigint."""

from decimal import ROUND_HALF_UP, ROUND_UP, Decimal

NANO_PER_USD = 1_000_000_000
NANO_PER_CENT = 10_000_000
LARGEST_USD = 9_000_000_000


def rated(*, quantity: int, price_nano: int, per: int) -> int:
    """Return the price of `quantity` units at `price_nano` per `per` units, rounded half up to the nano.

    Call it on cumulative quantities and post the difference: then rounding never adds up.
    """
    if quantity < 0 or price_nano < 0 or per <= 0:
        raise ValueError("quantity and price must not be negative, per must be positive")
    return (2 * quantity * price_nano + per) // (2 * per)


def usd_to_nano(usd: Decimal) -> int:
    """Return the exact nano amount. Raises ValueError for more than nine decimals, and for more than a bigint holds."""
    if not usd.is_finite() or usd.copy_abs() > LARGEST_USD:
        raise ValueError(f"an amount is at most {LARGEST_USD} dollars")
    nano = usd * NANO_PER_USD
    if nano != nano.to_integral_value():
        raise ValueError("an amount has at most nine decimals")
    return int(nano)


def nano_to_usd(nano: int) -> Decimal:
    return Decimal(nano) / NANO_PER_USD


def dollars(nano: int, *, rounding: str = ROUND_HALF_UP) -> str:
    """Write an amount as people read it: $1.24; below a cent two significant digits, so that $0.0004 is not $0.00."""
    amount, sign = nano_to_usd(abs(nano)), "-" if nano < 0 else ""
    if 0 < amount < Decimal("0.01"):
        amount = amount.quantize(Decimal(1).scaleb(amount.adjusted() - 1), rounding)
        return f"{sign}${amount.normalize():f}"
    return f"{sign}${amount.quantize(Decimal('0.01'), rounding):,.2f}"


def dollars_at_least(nano: int) -> str:
    """Write an amount that is enough: rounded up."""
    return dollars(nano, rounding=ROUND_UP)
