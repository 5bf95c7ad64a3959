"""Give the credit that was granted before there were lots its lots, by replaying each organization's postings."""

from collections import defaultdict

from django.db import migrations

_PROMOTIONAL_PRIORITY = 20


def fill_lots(apps, schema_editor):
    """One lot for each posting that brought credit; what went out is drawn from the oldest, what came back from a
    refund returns to the youngest it was drawn from. The database checks each posting against its lots."""
    Entry = apps.get_model("billing", "LedgerEntry")
    filled = set(apps.get_model("billing", "CreditLot").objects.values_list("organization_id", flat=True))
    entries = (
        Entry.objects.filter(account__kind__in=("wallet", "hold")).exclude(organization_id__in=filled).order_by("id")
    )
    postings = defaultdict(dict)  # organization -> transaction -> [net, kind, created_at], in the order of posting
    for organization_id, transaction_id, kind, at, nano in entries.values_list(
        "organization_id", "transaction_id", "transaction__kind", "transaction__created_at", "amount_nano"
    ).iterator():
        posting = postings[organization_id].setdefault(transaction_id, [0, kind, at])
        posting[0] += nano
    for organization_id, moved in postings.items():
        _replay(apps, organization_id, moved)


def _replay(apps, organization_id, postings):
    Lot, Movement = apps.get_model("billing", "CreditLot"), apps.get_model("billing", "LotMovement")
    lots, movements = [], []  # lots: [row, remaining], oldest first
    for transaction_id, (net, kind, at) in postings.items():
        if net > 0 and kind != "refund":
            row = Lot(organization_id=organization_id, kind="promotional", amount_nano=net, created_at=at,
                      priority=_PROMOTIONAL_PRIORITY)  # fmt: skip
            lots.append([row, 0])
            parts = [(lots[-1], net)]
        elif net > 0:
            parts = _split(reversed(lots), net, lambda lot: lot[0].amount_nano - lot[1])
        else:
            parts = _split(lots, -net, lambda lot: lot[1], sign=-1)
        for lot, amount in parts:
            lot[1] += amount
            movements.append(Movement(organization_id=organization_id, lot=lot[0], transaction_id=transaction_id,
                                      amount_nano=amount))  # fmt: skip
    Lot.objects.bulk_create(lot for lot, _ in lots)
    Movement.objects.bulk_create(movements, batch_size=5000)


def _split(lots, amount, room, sign=1):
    parts = []
    for lot in lots:
        part = min(amount, room(lot))
        if part:
            parts.append((lot, sign * part))
            amount -= part
    if amount:
        raise ValueError(f"the postings of an organization do not add up by {amount} nano")
    return parts


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0005_lots'),
    ]

    operations = [migrations.RunPython(fill_lots, migrations.RunPython.noop)]
