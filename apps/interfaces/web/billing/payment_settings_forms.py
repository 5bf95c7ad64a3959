"""Forms of the billing page."""

from decimal import Decimal
from typing import Any

from django import forms

_USD: dict[str, Any] = {"max_digits": 9, "decimal_places": 2}


class TopUpForm(forms.Form):
    amount_usd = forms.DecimalField(label="Amount in dollars", initial=50, **_USD)

    @property
    def amount_cents(self) -> int:
        return cents(self.cleaned_data["amount_usd"])


class AutoRechargeForm(forms.Form):
    is_enabled = forms.BooleanField(required=False, label="Charge the card when credit runs low")
    threshold_usd = forms.DecimalField(label="When less is left than", min_value=Decimal(0), **_USD)
    amount_usd = forms.DecimalField(label="Charge", **_USD)
    monthly_cap_usd = forms.DecimalField(
        label="At most in a month", help_text="Without tax; months are UTC.", min_value=Decimal(0), **_USD
    )

    def in_cents(self) -> dict[str, int]:
        return {
            f"{name}_cents": cents(self.cleaned_data[f"{name}_usd"]) for name in ("threshold", "amount", "monthly_cap")
        }


def cents(usd: Decimal) -> int:
    return int(usd * 100)
