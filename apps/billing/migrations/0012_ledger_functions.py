"""Lock a wallet, and write a posting, in one call each: a wallet that many spend from is held for as short as can be."""

from django.db import migrations

# Each statement of a function sees what was committed before it began: what follows the lock is read under it.
LOCK_WALLET = """
CREATE FUNCTION ledger_lock_wallet(of_organization text)
RETURNS TABLE (id text, organization_id text, balance_nano bigint, floor_nano bigint, stopped_because text,
               hold_account_id text, revenue_account_id text, has_budgets boolean,
               locked_at timestamptz)
LANGUAGE plpgsql AS $$
BEGIN
    SELECT wallet.id, wallet.organization_id, wallet.balance_nano, wallet.floor_nano, wallet.stopped_because
      INTO id, organization_id, balance_nano, floor_nano, stopped_because
      FROM billing_ledgeraccount wallet
     WHERE wallet.organization_id = of_organization AND wallet.kind = 'wallet'
       FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT account.id INTO hold_account_id FROM billing_ledgeraccount account
     WHERE account.organization_id = of_organization AND account.kind = 'hold';
    SELECT account.id INTO revenue_account_id FROM billing_ledgeraccount account
     WHERE account.organization_id IS NULL AND account.kind = 'revenue';
    has_budgets := EXISTS (
        SELECT FROM billing_budget budget WHERE budget.organization_id = of_organization AND budget.ended_at IS NULL);
    locked_at := clock_timestamp();
    RETURN NEXT;
END $$
"""
# The order in which lots are drawn is that of apps.billing.lots.spendable_lots.
POST = """
CREATE FUNCTION ledger_post(
    new_id text, of_organization text, of_kind text, of_key text, of_sha256 text, of_source text, of_actor text,
    of_reason text, reversed_id text, accounts text[], amounts bigint[], lots text[], lot_amounts bigint[],
    draw_nano bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    drawn_nano bigint := 0;
BEGIN
    INSERT INTO billing_ledgertransaction (id, organization_id, kind, idempotency_key, request_sha256, source, actor,
                                           reason, reverses_id)
    VALUES (new_id, of_organization, of_kind, of_key, of_sha256, of_source, of_actor, of_reason, reversed_id);
    INSERT INTO billing_ledgerentry (transaction_id, organization_id, account_id, amount_nano)
    SELECT new_id, of_organization, leg.account_id, leg.nano
      FROM unnest(accounts, amounts) AS leg(account_id, nano) ORDER BY leg.account_id;
    IF cardinality(lots) > 0 THEN
        INSERT INTO billing_lotmovement (transaction_id, organization_id, lot_id, amount_nano)
        SELECT new_id, of_organization, part.lot_id, part.nano
          FROM unnest(lots, lot_amounts) AS part(lot_id, nano) ORDER BY part.lot_id;
    END IF;
    IF draw_nano > 0 THEN
        WITH spendable AS (
            SELECT lot.id, lot.remaining_nano - lot.held_nano AS nano,
                   coalesce(sum(lot.remaining_nano - lot.held_nano) OVER (
                       ORDER BY lot.priority, lot.expires_at NULLS LAST, lot.created_at, lot.id
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before_nano
              FROM billing_creditlot lot
             WHERE lot.organization_id = of_organization AND lot.remaining_nano > 0
               AND lot.remaining_nano > lot.held_nano
        ), drawn AS (
            INSERT INTO billing_lotmovement (transaction_id, organization_id, lot_id, amount_nano)
            SELECT new_id, of_organization, spendable.id, -least(spendable.nano, draw_nano - spendable.before_nano)
              FROM spendable WHERE spendable.before_nano < draw_nano ORDER BY spendable.id
            RETURNING amount_nano
        )
        SELECT coalesce(-sum(amount_nano), 0) INTO drawn_nano FROM drawn;
    END IF;
    RETURN draw_nano - drawn_nano;
END $$
"""


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0011_usage_by_replica'),
    ]

    operations = [
        migrations.RunSQL(LOCK_WALLET, reverse_sql="DROP FUNCTION ledger_lock_wallet"),
        migrations.RunSQL(POST, reverse_sql="DROP FUNCTION ledger_post"),
    ]
