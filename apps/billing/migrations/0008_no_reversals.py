"""Drop the link between a posting and the one that it undoes, which nothing set, and post without it."""

from django.db import migrations, models

# One call writes a posting, so that the lock of the wallet is held for as short as can be.
# The order in which lots are drawn is that of apps.billing.lots.spendable_lots.
POST = """
CREATE FUNCTION ledger_post(
    new_id text, of_organization text, of_kind text, of_key text, of_sha256 text, of_source text, of_actor text,
    of_reason text, accounts text[], amounts bigint[], lots text[], lot_amounts bigint[], draw_nano bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    drawn_nano bigint := 0;
BEGIN
    INSERT INTO billing_ledgertransaction (id, organization_id, kind, idempotency_key, request_sha256, source, actor,
                                           reason)
    VALUES (new_id, of_organization, of_kind, of_key, of_sha256, of_source, of_actor, of_reason);
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
    dependencies = [('billing', '0007_estimate_loss')]

    operations = [
        # Installations of before have a `ledger_post` that sets the column.
        migrations.RunSQL("DROP FUNCTION IF EXISTS ledger_post", reverse_sql=migrations.RunSQL.noop),
        migrations.RemoveField(model_name='ledgertransaction', name='reverses'),
        migrations.AlterField(
            model_name='ledgertransaction',
            name='kind',
            field=models.CharField(choices=[('grant', 'Credit granted'), ('hold', 'Held'), ('settle', 'Charge settled, hold released'), ('refund', 'Given back'), ('usage', 'Usage charged'), ('topup', 'Paid in'), ('expiry', 'Credit expired'), ('adjustment', 'Adjusted by the operator'), ('rebate', 'Given back for volume'), ('debt_paid', 'Debt paid'), ('payment_reversed', 'Payment taken back'), ('payment_refunded', 'Paid back'), ('release', 'Hold released'), ('stripe_fee', "Stripe's fee"), ('estimate_loss', 'Time above the firm price, at our expense')], max_length=32),
        ),
        migrations.RunSQL(POST, reverse_sql="DROP FUNCTION ledger_post"),
    ]
