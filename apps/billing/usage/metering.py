"""Usage: what the gateways metered, summed by price and day, and charged by the sum.

Requests are never charged one by one. A series keeps an integer quantity; rating posts the price of the whole quantity
minus what is already posted. So rounding errors do not accumulate, and the order of records does not matter.

Locks are always taken in the same order: wallet, series by key, holds by id.
"""

import datetime
import hashlib
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import msgspec
from django.db import IntegrityError, connection, transaction
from django.db.models import F, QuerySet
from django.db.models.functions import Least

from apps.billing.budgets import attribution_of_key, record_spending
from apps.billing.ledger import beside, lock_wallet, post
from apps.billing.models import (
    AccountKind,
    Budget,
    Hold,
    LedgerAccount,
    PostingKind,
    UsageConflict,
    UsageEvent,
    UsageSeries,
)
from apps.billing.queries import open_slices
from apps.billing.tenant_batches import for_each
from apps.billing.usage.spending import RATED
from apps.billing.usage.traffic import COUNT_TRAFFIC
from apps.catalog.models import PriceRule
from apps.core.audit import require_transaction
from apps.core.database.clock import db_now
from apps.core.money import rated

logger = logging.getLogger(__name__)


# Ids of charged answers to requests that their sender may repeat, such as those of batches. The first one is charged.
REPEATABLE_PREFIX = "useb_"


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One metered request, or several refused ones, as a gateway spooled it. Token counts are the billed ones.

    A field added later has a default, which is not written: records that an older gateway spooled keep their digest.
    """

    id: str
    organization_id: str
    key_id: str
    model_name: str
    adapter_version_id: str
    slice_id: str
    input_price_id: str | None
    output_price_id: str | None
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    finish: str
    latency_ms: int
    first_token_ms: int | None
    occurred_at: datetime.datetime
    replica_id: str = ""  # the replica that answered
    engine_input_tokens: int = 0  # counted by the engine, charged or not
    engine_output_tokens: int = 0
    output_bytes: int | None = None  # of the answer, as the gateway saw it; None: not reported
    reserved_nano: int | None = None  # set aside for it in its slice; it is never charged more
    request_count: int = 1  # of refused requests, which are counted together

    @property
    def sha256(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


@dataclass(frozen=True)
class Recorded:
    """The outcome of a batch: counted now, counted before, or set aside because its id names another request.

    `beyond_reservation` of the new ones cost more than was reserved for them, and are not charged.
    """

    new: int
    known: int
    conflicting: int
    beyond_reservation: int = 0


def price_ceiling(*, quantity: int, price_nano: int, per: int) -> int:
    """Return the price of a quantity, rounded up. Rating never posts more than this reservation."""
    return -(-quantity * price_nano // per)


# --- Recording --------------------------------------------------------------------------------------------------------

# A temporary table of the connection, empty outside a batch.
_INCOMING = "CREATE TEMPORARY TABLE IF NOT EXISTS incoming_usage (sha256 text, body json)"
_RECORD = f"""
    WITH incoming AS (
        SELECT sha256, record.*
          FROM incoming_usage, json_to_record(body) AS record(id text, organization_id text, key_id text,
            model_name text, adapter_version_id text, slice_id text, input_price_id text, output_price_id text,
            input_tokens bigint, cached_input_tokens bigint, output_tokens bigint, finish text, latency_ms int,
            first_token_ms int, occurred_at timestamptz, replica_id text, engine_input_tokens bigint,
            engine_output_tokens bigint, output_bytes bigint, reserved_nano bigint, request_count int)
    ), bounded AS (
        -- No record can have reserved more than its slice holds.
        SELECT incoming.*, coalesce(
                 least(reserved_nano, CASE WHEN slice_id <> '' THEN coalesce(slice.amount_nano, 0) END)
                   < coalesce(div(input_tokens::numeric * read.price_nano + read.per - 1, read.per::numeric), 0)
                   + coalesce(div(output_tokens::numeric * wrote.price_nano + wrote.per - 1, wrote.per::numeric), 0),
                 false) AS is_beyond
          FROM incoming
          LEFT JOIN billing_hold AS slice ON slice.id = slice_id AND slice.organization_id = incoming.organization_id
          LEFT JOIN catalog_pricerule AS read ON read.id = input_price_id
          LEFT JOIN catalog_pricerule AS wrote ON wrote.id = output_price_id
    ), fresh AS (
        INSERT INTO billing_usageevent (id, organization_id, key_id, model_name, adapter_version_id, slice_id,
            input_price_id, output_price_id, input_tokens, cached_input_tokens, output_tokens, finish, latency_ms,
            first_token_ms, occurred_at, body_sha256, replica_id, engine_input_tokens, engine_output_tokens,
            output_bytes, request_count)
        SELECT id, organization_id, key_id, model_name, adapter_version_id, slice_id,
            input_price_id, output_price_id, CASE WHEN is_beyond THEN 0 ELSE input_tokens END,
            CASE WHEN is_beyond THEN 0 ELSE cached_input_tokens END, CASE WHEN is_beyond THEN 0 ELSE output_tokens END,
            finish, latency_ms, first_token_ms, occurred_at, sha256, coalesce(replica_id, ''),
            coalesce(engine_input_tokens, 0), coalesce(engine_output_tokens, 0), output_bytes,
            coalesce(request_count, 1)
          FROM bounded
         ORDER BY id
        ON CONFLICT (id) DO NOTHING
        RETURNING id, organization_id, key_id, model_name, adapter_version_id, slice_id, occurred_at, input_price_id,
            input_tokens, cached_input_tokens, output_price_id, output_tokens, body_sha256, finish, latency_ms,
            first_token_ms, request_count
    ), used AS (
        SELECT fresh.organization_id, price.sku, price.id AS price_rule_id, fresh.model_name AS subject,
               fresh.key_id, fresh.adapter_version_id, fresh.slice_id, way.tokens,
               (fresh.occurred_at AT TIME ZONE 'UTC')::date AS day,
               div(way.tokens::numeric * price.price_nano + price.per - 1, price.per::numeric) AS cost_nano
          FROM fresh
         CROSS JOIN LATERAL (VALUES (input_price_id, input_tokens), (output_price_id, output_tokens)) AS way(id, tokens)
          JOIN catalog_pricerule AS price ON price.id = way.id
    ), rolled_up AS (
        INSERT INTO billing_usageseries AS series (organization_id, sku, price_rule_id, subject, key_id,
            adapter_version_id, day, quantity, request_count, rated_quantity, rated_request_count, posted_nano,
            invoiced_nano)
        SELECT organization_id, sku, price_rule_id, subject, key_id, adapter_version_id, day, sum(tokens), count(*),
               0, 0, 0, 0
          FROM used
         GROUP BY organization_id, sku, price_rule_id, subject, key_id, adapter_version_id, day
         ORDER BY organization_id, price_rule_id, subject, key_id, adapter_version_id, day
        ON CONFLICT (organization_id, price_rule_id, subject, key_id, adapter_version_id, day) DO UPDATE
           SET quantity = series.quantity + excluded.quantity,
               request_count = series.request_count + excluded.request_count
    ), {COUNT_TRAFFIC}
    SELECT (SELECT count(*) FROM fresh),
           (SELECT coalesce(json_object_agg(slice_id, cost_nano), '{{}}')
              FROM (SELECT slice_id, sum(cost_nano)::bigint AS cost_nano FROM used GROUP BY slice_id) AS by_slice),
           (SELECT count(input_price_id) + count(output_price_id) FROM fresh) - (SELECT count(*) FROM used),
           (SELECT count(*) FROM (SELECT DISTINCT organization_id AS id FROM fresh) AS named
             WHERE NOT EXISTS (SELECT FROM accounts_organization AS known WHERE known.id = named.id)),
           (SELECT coalesce(json_agg(fresh.id), '[]')
              FROM fresh JOIN bounded ON bounded.id = fresh.id AND bounded.sha256 = fresh.body_sha256 AND is_beyond)
"""  # noqa: S608 - all parts are constants


@transaction.atomic
def record_usage(*, records: Sequence[UsageRecord]) -> Recorded:
    """Store the records and add the new ones to their series; sending them again adds nothing.

    A record that reuses an id with another body is logged and kept as a UsageConflict. So is a record that costs more
    than was reserved for it; nothing of it is charged. Raises IntegrityError, and stores no record, when one names a
    price or an organization that does not exist.
    """
    bodies: dict[tuple[str, str], UsageRecord] = {}
    lines: list[bytes] = []
    for record in records:
        body = msgspec.json.encode(record)
        sha256 = hashlib.sha256(body).hexdigest()
        if (record.id, sha256) not in bodies:
            bodies[record.id, sha256] = record
            # COPY's text format. JSON has no raw tabs or newlines, so only backslashes are escaped.
            lines.append(b"%s\t%s\n" % (sha256.encode(), body.replace(b"\\", b"\\\\")))
    with connection.cursor() as cursor:
        cursor.execute(_INCOMING)
        with cursor.copy("COPY incoming_usage (sha256, body) FROM STDIN") as copy:
            copy.write(b"".join(lines))
        cursor.execute(_RECORD)
        new, used_by_slice, unpriced, unowned, beyond = cursor.fetchone()
        if unpriced or unowned:
            raise IntegrityError(f"usage names {unpriced} unknown prices and {unowned} unknown organizations")
        cursor.execute("TRUNCATE incoming_usage")
    # Add the usage to each open slice, so that rating takes the money from where it was reserved.
    found = open_slices().filter(pk__in=[slice_id for slice_id in used_by_slice if slice_id])
    for open_slice in found.order_by("pk").select_for_update():
        Hold.objects.filter(pk=open_slice.pk).update(used_nano=F("used_nano") + used_by_slice[open_slice.pk])
    conflicting = _set_conflicts_aside(bodies) if new < len(bodies) else 0
    if beyond:
        for (event_id, sha256), record in bodies.items():
            if record.id in beyond:
                logger.critical("usage %s costs more than was reserved for it; nothing of it is charged", event_id)
                _keep_aside(record, sha256)
    return Recorded(
        new=new, known=len(bodies) - new - conflicting, conflicting=conflicting, beyond_reservation=len(beyond)
    )


def record_quantity(
    *,
    organization_id: str,
    price: PriceRule,
    subject: str,
    day: datetime.date,
    quantity: int,
    adapter_version_id: str = "",
) -> None:
    """Add a quantity of time or storage to its series; rating charges it as it charges requests.

    The caller ensures that each quantity is added once.
    """
    require_transaction()
    series, _ = UsageSeries.objects.get_or_create(
        organization_id=organization_id,
        price_rule=price,
        subject=subject,
        key_id="",
        adapter_version_id=adapter_version_id,
        day=day,
        defaults={"sku": price.sku},
    )
    UsageSeries.objects.filter(pk=series.pk).update(
        quantity=F("quantity") + quantity, request_count=F("request_count") + 1
    )


def _set_conflicts_aside(known: dict[tuple[str, str], UsageRecord]) -> int:
    """Keep the records whose id stands for another body; return how many they are."""
    ids = {event_id for event_id, _ in known}
    stored = dict(UsageEvent.objects.filter(pk__in=ids).values_list("pk", "body_sha256"))
    conflicts = {key: record for key, record in known.items() if stored[record.id] != key[1]}
    for (event_id, sha256), record in conflicts.items():
        if event_id.startswith(REPEATABLE_PREFIX):
            logger.info("usage %s came again and is charged once", event_id)
            continue
        logger.error("usage %s came again with another body and was set aside", event_id)
        _keep_aside(record, sha256)
    return len(conflicts)


def _keep_aside(record: UsageRecord, sha256: str) -> None:
    conflict = UsageConflict(
        organization_id=record.organization_id,
        event_id=record.id,
        body=msgspec.to_builtins(record),
        body_sha256=sha256,
    )
    UsageConflict.objects.bulk_create([conflict], ignore_conflicts=True)


_LINES_AT_ONCE, _SECONDS_OF_ONE = 200, 3.0  # a wallet is locked, and the others wait, for so long at most
_SERIES_KEY = ("price_rule_id", "subject", "key_id", "adapter_version_id", "day")

# --- Rating -----------------------------------------------------------------------------------------------------------


def rate_usage() -> int:
    """Charge every organization for its usage since the last run; return the nano posted. Safe to repeat.

    An organization that cannot be charged is logged as critical and left to the next run; the others are charged.
    """
    waiting = UsageSeries.objects.filter(request_count__gt=F("rated_request_count"))
    organizations = waiting.order_by("organization_id").values_list("organization_id", flat=True).distinct()
    return for_each(organizations, _rate_one, name="what was used is charged", now=db_now())


def _rate_one(organization_id: str) -> int:
    return rate_in_parts(organization_id=organization_id)[0]


def rate_in_parts(*, organization_id: str, key_id: str = "") -> tuple[int, bool]:
    """Charge an organization, or what one key used, in small transactions, for a few seconds at most.

    Return the nano posted, and whether all had its turn: the next run does the rest.
    """
    total, last, until = 0, 0, math.inf
    while time.monotonic() < until:
        with transaction.atomic():
            wallet = lock_wallet(organization=organization_id)
            until = min(until, time.monotonic() + _SECONDS_OF_ONE)  # not counting the first wait for the wallet
            found = list_unrated(wallet=wallet, key_id=key_id, after=last)
            total += rate_organization(wallet=wallet, series=found)
            if len(found) < _LINES_AT_ONCE:
                return total, True
            last = found[-1]
    return total, False


def list_unrated(*, wallet: LedgerAccount, key_id: str = "", after: int = 0) -> list[int]:
    """Return the next unrated series of the wallet's owner, or of one key: as many as one transaction charges.

    Without money, only those that cost nothing more: any number of others may wait for credit.
    """
    later = _unrated(wallet).filter(pk__gt=after, **({"key_id": key_id} if key_id else {}))
    # Nothing can pay unless the wallet, or an open slice for the usage recorded in it, has money.
    unpaid = open_slices().filter(organization_id=wallet.owner_id, captured_nano__lt=Least("used_nano", "amount_nano"))
    if wallet.balance_nano <= 0 and not unpaid.exists():
        later = later.filter(posted_nano__gte=RATED)
    return list(later.order_by("pk").values_list("pk", flat=True)[:_LINES_AT_ONCE])


def rate_organization(*, wallet: LedgerAccount, series: Sequence[int]) -> int:
    """Charge the owner of the locked wallet for what these series recorded so far; return the nano posted.

    Money comes from the open slices it was reserved in, then from the wallet. What neither can pay stays unrated until
    there is credit again: this is usage of a slice that was closed before its gateway could report it. No request in it
    costs more than was reserved for it (`record_usage`).
    """
    require_transaction()
    unrated = _unrated(wallet).filter(pk__in=series)
    lines = list(unrated.order_by(*_SERIES_KEY).select_related("price_rule").select_for_update(of=("self",)))
    if not lines:
        return 0
    of_wallet = open_slices().filter(organization_id=wallet.owner_id)
    slices = list(of_wallet.order_by("pk").select_for_update())
    of_key: dict[str, list[Hold]] = defaultdict(list)
    for one in slices:
        of_key[one.key_id].append(one)
    paid = Counter[str]()  # by key
    for line in lines:
        paid[line.key_id] += _post_line(line, wallet, chain(of_key[line.key_id], slices))
    if Budget.objects.filter(organization_id=wallet.owner_id, ended_at=None).exists():
        whose = partial(attribution_of_key, organization=wallet.owner_id)
        charges = [(whose(key_id=key_id), amount_nano) for key_id, amount_nano in paid.items()]
        record_spending(organization=wallet.owner_id, charges=charges)
    for line in lines:  # once the budgets were counted
        line.save(update_fields=["posted_nano", "rated_quantity", "rated_request_count"])
    return paid.total()


def _unrated(wallet: LedgerAccount) -> QuerySet[UsageSeries]:
    return UsageSeries.objects.filter(organization_id=wallet.owner_id, request_count__gt=F("rated_request_count"))


def _post_line(line: UsageSeries, wallet: LedgerAccount, slices: Iterable[Hold]) -> int:
    """Charge a line from the slices in their order, then from the wallet; return the nano that were paid."""
    price = line.price_rule
    due = rated(quantity=line.quantity, price_nano=price.price_nano, per=price.per) - line.posted_nano
    from_slices = 0
    for one in slices:
        if from_slices == due:
            break
        part = min(min(one.used_nano, one.amount_nano) - one.captured_nano, due - from_slices)
        if part > 0:
            one.captured_nano += part
            one.save(update_fields=["captured_nano"])
            from_slices += part
    from_wallet = min(due - from_slices, wallet.balance_nano)
    paid = from_slices + from_wallet
    if paid:
        posted_after = line.posted_nano + paid
        post(
            organization=wallet.owner_id,
            kind=PostingKind.USAGE,
            legs={
                beside(wallet, AccountKind.HOLD): -from_slices,
                wallet: -from_wallet,
                beside(wallet, AccountKind.REVENUE): paid,
            },
            by="system",
            source=f"usage:{line.pk}",
            # The sum posted so far, not the quantity: an unpaid rest is posted later at the same quantity.
            idempotency_key=f"usage:{line.pk}:{posted_after}",
            request={"usage": line.pk, "posted_nano": posted_after},
            reason=f"{line.sku} {line.subject}",
        )
        line.posted_nano += paid
        wallet.balance_nano -= from_wallet  # matches what the trigger did to the row
    if paid == due:
        line.rated_quantity, line.rated_request_count = line.quantity, line.request_count
    else:
        logger.warning("usage series %s: %d nano could not be charged yet", line.pk, due - paid)
    return paid
