"""Amounts in dollars, as the bodies of requests have them."""

from decimal import Decimal

from apps.core.errors import InvalidValue
from apps.core.money import LARGEST_USD, parse_usd, usd_to_nano


def read_nano(param: str, amount: str | float, *, example: str = "2.50") -> int:
    """Return the exact amount in nano-USD. Raises InvalidValue that names `param` and shows the `example`."""
    try:
        return parse_usd(amount) if isinstance(amount, str) else usd_to_nano(Decimal(str(amount)))
    except ValueError as error:
        text = f"'{param}' is an amount in dollars, such as {example}: at most {LARGEST_USD:,}, nine decimals."
        raise InvalidValue(text, param=param) from error
