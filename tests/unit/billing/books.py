"""What must hold of the books after every step of any process; the numbers are those of the ledger's invariants."""

from django.db import connection

from apps.accounts.models import Organization
from apps.billing.books.reconciliation import CHECKS
from apps.billing.models import BudgetPeriod, CreditLot, Hold, LedgerAccount, LedgerEntry, LotMovement
from apps.billing.usage.metering import UsageRecord
from tests.factories.money import give_credit
from tests.factories.usage import make_record

_FOREIGN = """
    SELECT entry.id FROM billing_ledgerentry entry
      JOIN billing_ledgeraccount account ON account.id = entry.account_id
      JOIN billing_ledgertransaction txn ON txn.id = entry.transaction_id
     WHERE account.organization_id IS NOT NULL AND account.organization_id <> txn.organization_id
        OR entry.organization_id IS DISTINCT FROM txn.organization_id
"""


def assert_books_hold() -> None:
    """Assert what the books always are.

    P1 sums of zero; P2 balances are their entries, and lots the credit; P3 nothing below its floor; P4 the hold account
    is the open holds; P6 captured within the hold; P7 refunded within the captured; P17 no posting across tenants.
    """
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("SET CONSTRAINTS ALL DEFERRED")
        for name, statement in CHECKS.items():
            cursor.execute(statement, {"since": "2000-01-01"})
            assert cursor.fetchall() == [], name
        cursor.execute(_FOREIGN)
        assert cursor.fetchall() == [], "a posting across tenants"
    assert all(row.balance_nano >= row.floor_nano for row in LedgerAccount.objects.exclude(floor_nano=None))
    for found in Hold.objects.all():
        assert 0 <= found.refunded_nano <= found.captured_nano <= found.amount_nano
        assert (found.status == "closed") == (found.closed_at is not None)
    for lot in CreditLot.objects.all():
        assert 0 <= lot.held_nano <= lot.remaining_nano <= lot.amount_nano


def balances(organization: Organization) -> dict[str, int]:
    """Return each account's sum, of the organization's own postings."""
    sums: dict[str, int] = {}
    rows = LedgerEntry.objects.filter(organization=organization)
    for kind, nano in rows.values_list("account__kind", "amount_nano"):
        sums[kind] = sums.get(kind, 0) + nano
    return {kind: nano for kind, nano in sums.items() if nano}


def history() -> list[tuple[int, str, int]]:
    """Return every entry and lot movement ever written, in order."""
    entries = LedgerEntry.objects.order_by("id").values_list("id", "account_id", "amount_nano")
    movements = LotMovement.objects.order_by("id").values_list("id", "lot_id", "amount_nano")
    return [*entries, *movements]


def assert_budgets_hold(organization: Organization) -> None:
    """P10: spent and set aside never pass a limit that blocks."""
    for period in BudgetPeriod.objects.filter(organization=organization).select_related("budget"):
        if period.budget.mode != "alert" and period.budget.ended_at is None:
            holds = Hold.objects.filter(organization=organization, status="open", purpose__in=("job", "inference"))
            aside = sum(each.amount_nano - each.captured_nano for each in holds)
            assert period.spent_nano + aside <= period.budget.limit_nano


# --- doing things ---


def usage_record(organization: Organization, price_id: str, tokens: int, slice_id: str, identifier: str) -> UsageRecord:
    return make_record(
        id=identifier, organization_id=organization.pk, slice_id=slice_id, input_price_id=price_id,
        output_price_id=None, input_tokens=tokens, output_tokens=0,
    )  # fmt: skip


def funded(nano: int, slug: str = "crowd") -> Organization:
    organization = Organization.objects.create(name=slug, slug=slug)
    give_credit(organization, nano)
    return organization
