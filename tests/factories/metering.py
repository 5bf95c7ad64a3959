"""A customer whose requests are metered, and what they cost."""

import dataclasses
from itertools import count

from apps.accounts.models import Organization
from apps.billing.ledger import account
from apps.billing.models import AccountKind, LedgerEntry
from apps.billing.usage.metering import UsageRecord
from apps.billing.usage.slices import lease_slice
from apps.catalog.models import PriceRule
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.money import rated
from tests.factories.money import USD, give_credit
from tests.factories.usage import make_record

MODEL = "ft:anneal-demo:northline:bot:01"
INPUT_NANO, OUTPUT_NANO, PER = 70_000_003, 210_000_011, 1_000_000
_numbers = count(1)


@dataclasses.dataclass(frozen=True)
class Customer:
    organization: Organization
    input_price: PriceRule
    output_price: PriceRule

    def record(self, **fields) -> UsageRecord:
        values = {
            "id": f"use_{next(_numbers):026}", "organization_id": self.organization.pk, "model_name": MODEL,
            "adapter_version_id": "adpv_1", "slice_id": "", "input_price_id": self.input_price.pk,
            "output_price_id": self.output_price.pk, "input_tokens": 11, "output_tokens": 7,
        }  # fmt: skip
        return make_record(**values | fields)

    def lease(self, required_nano: int, hold_id: str | None = None):
        return lease_slice(
            organization=self.organization, required_nano=required_nano, by="gateway:test", hold_id=hold_id
        )


def make_customer(credit_nano: int = 10 * USD) -> Customer:
    number = next(_numbers)
    organization = Organization.objects.create(name="Northline", slug=f"northline-{number}")
    if credit_nano:
        give_credit(organization, credit_nano)
    prices = [
        set_price(sku=f"{sku}-{number}", unit="tokens", price_nano=nano, per=PER, by="system", now=db_now())
        for sku, nano in (("inference:input:demo", INPUT_NANO), ("inference:output:demo", OUTPUT_NANO))
    ]
    return Customer(organization, *prices)


def price_of(records: list[UsageRecord]) -> int:
    return rated(quantity=sum(r.input_tokens for r in records), price_nano=INPUT_NANO, per=PER) + rated(
        quantity=sum(r.output_tokens for r in records), price_nano=OUTPUT_NANO, per=PER
    )


def earned(organization: Organization) -> int:
    revenue = account(organization=None, kind=AccountKind.REVENUE)
    return sum(
        LedgerEntry.objects.filter(account=revenue, organization=organization).values_list("amount_nano", flat=True)
    )
