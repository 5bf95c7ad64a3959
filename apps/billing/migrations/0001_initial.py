"""The ledger, holds, lots, usage, traffic, budgets, requests for credit, and invoices."""

import apps.core.ids
import django.contrib.postgres.fields
import django.contrib.postgres.indexes
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models

ADD_TO_BALANCES = """
    UPDATE billing_ledgeraccount account SET balance_nano = account.balance_nano + added.nano
      FROM (SELECT account_id, sum(amount_nano)::bigint AS nano FROM new_entries GROUP BY account_id) added
     WHERE account.id = added.account_id AND account.floor_nano IS NOT NULL;
    RETURN NULL;
"""
CHECK_TRANSACTION = """
    SELECT coalesce(sum(entry.amount_nano), 0),
           coalesce(sum(entry.amount_nano) FILTER (WHERE account.kind IN ('wallet', 'hold')), 0),
           (SELECT coalesce(sum(moved.amount_nano), 0) FROM billing_lotmovement moved
             WHERE moved.transaction_id = NEW.transaction_id)
      INTO total, credit, lots
      FROM billing_ledgerentry entry JOIN billing_ledgeraccount account ON account.id = entry.account_id
     WHERE entry.transaction_id = NEW.transaction_id;
    IF total <> 0 THEN
        RAISE EXCEPTION 'ledger transaction % does not balance: %', NEW.transaction_id, total USING ERRCODE = '23514';
    END IF;
    IF credit <> lots THEN
        RAISE EXCEPTION 'ledger transaction % moves % of credit and % of lots', NEW.transaction_id, credit, lots
            USING ERRCODE = '23514';
    END IF;
    RETURN NULL;
"""
ADD_TO_LOT = """
    UPDATE billing_creditlot SET remaining_nano = remaining_nano + NEW.amount_nano WHERE id = NEW.lot_id;
    RETURN NULL;
"""
# Lock a wallet in one call: a wallet that many spend from is held for as short as can be.
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
# An index answers alone for pages that a vacuum has looked at. By default, that is after a fifth of a table has
# changed, so those of the last month would never be ready.
VACUUM_OFTEN = """
    ALTER TABLE billing_hold SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_insert_scale_factor = 0.01)
"""


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
        ('catalog', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Budget',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='bud', primary_key=True, separator='_', serialize=False)),
                ('scope', models.CharField(choices=[('organization', 'the whole organization'), ('label', 'a metadata label'), ('key', 'an API key'), ('member', 'a member'), ('project', 'a project')], max_length=16)),
                ('target', models.CharField(blank=True, help_text='name=value, or the id of the key, member or project.', max_length=600)),
                ('limit_nano', models.BigIntegerField()),
                ('mode', models.CharField(choices=[('alert', 'Alert only'), ('block', 'Alert and block new usage'), ('pause', 'Alert, block new usage and pause running jobs')], max_length=8)),
                ('thresholds', models.JSONField(default=list, help_text='Percent of the limit at which to alert, each once a month.')),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('ended_at', models.DateTimeField(null=True)),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(condition=models.Q(('ended_at', None)), fields=('organization', 'scope', 'target'), name='budget_once'),
                    models.CheckConstraint(condition=models.Q(('limit_nano__gt', 0)), name='budget_positive'),
                ],
            },
        ),
        migrations.CreateModel(
            name='BudgetPeriod',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('budget', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='periods', to='billing.budget')),
                ('month', models.DateField()),
                ('spent_nano', models.BigIntegerField(default=0)),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('budget', 'month'), name='budget_period_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='BudgetAlert',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('budget', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='alerts', to='billing.budget')),
                ('month', models.DateField()),
                ('threshold', models.PositiveSmallIntegerField()),
                ('spent_nano', models.BigIntegerField()),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('budget', 'month', 'threshold'), name='budget_alert_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='budget_alert_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='billing_budgetalert',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='2ba23c7bb342890259d63e86ed11c43c902fd75d',
                            pgid='pgtrigger_budget_alert_append_only_5a093',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='KeyLabel',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('key_id', models.CharField(max_length=40)),
                ('name', models.CharField(max_length=64)),
                ('value', models.CharField(max_length=512)),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'key_id', 'name'), name='key_label_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='BillingProfile',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='bill', primary_key=True, separator='_', serialize=False)),
                ('legal_name', models.CharField(blank=True, max_length=200)),
                ('address', models.TextField(blank=True, max_length=1000)),
                ('is_daily_report_wanted', models.BooleanField(default=True)),
                ('chargeback_label', models.CharField(default='team', help_text='Invoices are split by it.', max_length=64)),
                ('low_balance_at', models.DateTimeField(help_text='When its members got notice of its low balance.', null=True)),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization',), name='billing_profile_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Invoice',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='inv', primary_key=True, separator='_', serialize=False)),
                ('number', models.CharField(max_length=32, unique=True)),
                ('month', models.DateField()),
                ('issued_at', models.DateTimeField()),
                ('billed_to', models.TextField(blank=True)),
                ('total_nano', models.BigIntegerField()),
                ('total_cents', models.BigIntegerField()),
                ('cumulative_nano', models.BigIntegerField(help_text='Of all invoices up to this one: cents are rounded on it.')),
                ('external_id', models.CharField(help_text='Of the copy collected elsewhere.', max_length=80, null=True, unique=True)),
                ('paid_at', models.DateTimeField(null=True)),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'month'), name='invoice_once_a_month'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='invoice_no_delete',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='DELETE',
                            table='billing_invoice',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot delete rows from % table', TG_TABLE_NAME;",
                            hash='2f80ca7c1465068ff812bb72d2fa90cc647b949a',
                            pgid='pgtrigger_invoice_no_delete_6c169',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='invoice_frozen',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            condition='WHEN (OLD."number" IS DISTINCT FROM (NEW."number") OR OLD."month" IS DISTINCT FROM (NEW."month") OR OLD."issued_at" IS DISTINCT FROM (NEW."issued_at") OR OLD."billed_to" IS DISTINCT FROM (NEW."billed_to") OR OLD."total_nano" IS DISTINCT FROM (NEW."total_nano") OR OLD."total_cents" IS DISTINCT FROM (NEW."total_cents") OR OLD."cumulative_nano" IS DISTINCT FROM (NEW."cumulative_nano"))',
                            operation='UPDATE',
                            table='billing_invoice',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update rows from % table', TG_TABLE_NAME;",
                            hash='07956ba8ea816df28888b131125aa68924e01d1e',
                            pgid='pgtrigger_invoice_frozen_805c9',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='InvoiceLine',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='line', primary_key=True, separator='_', serialize=False)),
                ('invoice', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='lines', to='billing.invoice')),
                ('position', models.PositiveIntegerField()),
                ('kind', models.CharField(max_length=16)),
                ('subject', models.CharField(max_length=200)),
                ('reference', models.CharField(help_text='The hold of a job; empty where a line adds up series.', max_length=64)),
                ('sku', models.CharField(blank=True, max_length=120)),
                ('price_rule', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.pricerule')),
                ('unit', models.CharField(blank=True, max_length=16)),
                ('quantity', models.BigIntegerField()),
                ('first_day', models.DateField()),
                ('last_day', models.DateField()),
                ('key_id', models.CharField(blank=True, max_length=40)),
                ('adapter_version_id', models.CharField(blank=True, max_length=40)),
                ('member_id', models.CharField(blank=True, max_length=40)),
                ('label', models.CharField(blank=True, help_text="Of the organization's charge-back label.", max_length=512)),
                ('nano', models.BigIntegerField()),
                ('cents', models.BigIntegerField()),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('invoice', 'position'), name='invoice_line_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='invoice_line_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='billing_invoiceline',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='2218445140ac7652d7493ad7fc3275ff932ca928',
                            pgid='pgtrigger_invoice_line_append_only_05fce',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='PoolCost',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('pool_name', models.CharField(max_length=40)),
                ('nano_per_gpu_hour', models.BigIntegerField()),
                ('from_day', models.DateField()),
                ('set_by', models.CharField(max_length=64)),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('pool_name', 'from_day'), name='pool_cost_once'),
                    models.CheckConstraint(condition=models.Q(('nano_per_gpu_hour__gte', 0)), name='pool_cost_positive'),
                ],
            },
        ),
        migrations.CreateModel(
            name='LedgerCheck',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('name', models.CharField(max_length=64)),
                ('checked_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('difference_count', models.PositiveIntegerField()),
                ('differences', models.JSONField(default=list, help_text='The first twenty: what, ours, theirs.')),
            ],
            options={
                'indexes': [
                    models.Index(fields=['name', '-checked_at'], name='ledger_check_newest'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='ledger_check_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='billing_ledgercheck',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='af6d8942886f93a2b818aa7921f39c7d73dfa3ba',
                            pgid='pgtrigger_ledger_check_append_only_40a79',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='LedgerAccount',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='acct', primary_key=True, separator='_', serialize=False)),
                ('organization', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('kind', models.CharField(choices=[('wallet', 'Wallet'), ('hold', 'Hold'), ('revenue', 'Revenue'), ('promotional_credit', 'Promotional Credit'), ('cash_clearing', 'Cash Clearing'), ('adjustment', 'Adjustment'), ('receivable', 'Receivable'), ('stripe_fees', 'Stripe Fees'), ('tax_payable', 'Tax Payable'), ('breakage', 'Breakage'), ('estimate_loss', 'Estimate Loss')], max_length=24)),
                ('balance_nano', models.BigIntegerField(default=0, help_text='Kept by trigger, only where a floor is set.')),
                ('floor_nano', models.BigIntegerField(null=True)),
                ('stopped_because', models.CharField(blank=True, help_text='Of a wallet nothing is spent from, jobs and requests alike: why.', max_length=200)),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'kind'), name='account_once', nulls_distinct=False),
                    models.CheckConstraint(condition=models.Q(('floor_nano', None), ('balance_nano__gte', models.F('floor_nano')), _connector='OR'), name='account_floor'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='account_balance_by_entries',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            condition='WHEN (pg_trigger_depth() < 1)',
                            operation='UPDATE OF "balance_nano", "floor_nano"',
                            table='billing_ledgeraccount',
                            when='BEFORE',
                            func='RAISE EXCEPTION \'pgtrigger: Cannot update of "balance_nano", "floor_nano" rows from % table\', TG_TABLE_NAME;',
                            hash='3cf791f157830db2856b500cd52a6eb435f20946',
                            pgid='pgtrigger_account_balance_by_entries_d4112',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='LedgerTransaction',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='txn', primary_key=True, separator='_', serialize=False)),
                ('organization', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('kind', models.CharField(choices=[('grant', 'Credit granted'), ('hold', 'Held'), ('settle', 'Charge settled, hold released'), ('refund', 'Given back'), ('usage', 'Usage charged'), ('topup', 'Paid in'), ('expiry', 'Credit expired'), ('adjustment', 'Adjusted by the operator'), ('rebate', 'Given back for volume'), ('debt_paid', 'Debt paid'), ('payment_reversed', 'Payment taken back'), ('payment_refunded', 'Paid back'), ('release', 'Hold released'), ('stripe_fee', "Stripe's fee"), ('estimate_loss', 'Time above the firm price, at our expense')], max_length=32)),
                ('idempotency_key', models.CharField(max_length=200, unique=True)),
                ('request_sha256', models.CharField(max_length=64)),
                ('source', models.CharField(help_text='The job, slice or grant it is for.', max_length=64)),
                ('actor', models.CharField(max_length=64)),
                ('reason', models.CharField(blank=True, max_length=300)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', '-created_at', '-id'], name='txn_newest'),
                    models.Index(condition=models.Q(('kind', 'usage'), _negated=True), fields=['source'], name='txn_source'),
                    models.Index(condition=models.Q(('kind', 'estimate_loss')), fields=['created_at'], name='txn_estimate_losses'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='txn_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='billing_ledgertransaction',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='4227166751b3766ec90a6865e6370b4a11e51c2b',
                            pgid='pgtrigger_txn_append_only_ec495',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='Adjustment',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='adj', primary_key=True, separator='_', serialize=False)),
                ('kind', models.CharField(choices=[('adjustment', 'adjustment'), ('refund', 'refund of a charge')], max_length=12)),
                ('source', models.CharField(blank=True, help_text='Refunds: the job that was charged.', max_length=64)),
                ('amount_nano', models.BigIntegerField()),
                ('reason', models.CharField(max_length=300)),
                ('status', models.CharField(choices=[('posted', 'posted'), ('rejected', 'rejected'), ('requested', 'requested')], default='requested', max_length=12)),
                ('needs_approval', models.BooleanField()),
                ('requested_by', models.CharField(max_length=64)),
                ('requested_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('decided_by', models.CharField(max_length=64, null=True)),
                ('decided_at', models.DateTimeField(null=True)),
                ('transaction', models.OneToOneField(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='adjustment', to='billing.ledgertransaction')),
            ],
            options={
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('amount_nano', 0), _negated=True), name='adjustment_not_zero'),
                    models.CheckConstraint(condition=models.Q(('decided_by', models.F('requested_by')), ('needs_approval', True), ('status', 'posted'), _negated=True), name='adjustment_by_two'),
                    models.CheckConstraint(condition=models.Q(models.Q(('decided_at', None), ('decided_by', None), ('status', 'requested')), models.Q(('decided_at__isnull', False), ('decided_by__isnull', False), ('status__in', ['posted', 'rejected'])), _connector='OR'), name='adjustment_decided_pair'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='adjustment_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='billing_adjustment',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{requested:posted,requested:rejected}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='625874e3243e59f8d2e1aeeff878007b715a6407',
                            pgid='pgtrigger_adjustment_status_a1821',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='adjustment_no_delete',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='DELETE',
                            table='billing_adjustment',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot delete rows from % table', TG_TABLE_NAME;",
                            hash='7cc2936fe4fc286001c689bf53ad7c5877feaaf5',
                            pgid='pgtrigger_adjustment_no_delete_18678',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='adjustment_frozen',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            condition='WHEN (OLD."kind" IS DISTINCT FROM (NEW."kind") OR OLD."source" IS DISTINCT FROM (NEW."source") OR OLD."amount_nano" IS DISTINCT FROM (NEW."amount_nano") OR OLD."reason" IS DISTINCT FROM (NEW."reason") OR OLD."needs_approval" IS DISTINCT FROM (NEW."needs_approval") OR OLD."requested_by" IS DISTINCT FROM (NEW."requested_by"))',
                            operation='UPDATE',
                            table='billing_adjustment',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update rows from % table', TG_TABLE_NAME;",
                            hash='224f375f5beb277cd6a062e9ad2b534480be85fe',
                            pgid='pgtrigger_adjustment_frozen_a5417',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='LedgerEntry',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('transaction', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='entries', to='billing.ledgertransaction')),
                ('organization', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('account', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='entries', to='billing.ledgeraccount')),
                ('amount_nano', models.BigIntegerField(help_text='Credit positive, debit negative.')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    django.contrib.postgres.indexes.BrinIndex(fields=['created_at'], name='entry_by_time'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('amount_nano', 0), _negated=True), name='entry_not_zero'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='entry_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='billing_ledgerentry',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='cc1a41d6f8f6a3451fdfe49ae79708abdd53a57e',
                            pgid='pgtrigger_entry_append_only_5148c',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='entry_balance',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            level='STATEMENT',
                            operation='INSERT',
                            referencing='REFERENCING NEW TABLE AS new_entries ',
                            table='billing_ledgerentry',
                            when='AFTER',
                            func=ADD_TO_BALANCES,
                            hash='b619393d4bc137080306cbd63ba1ebddd0f8e8a1',
                            pgid='pgtrigger_entry_balance_58516',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='entry_zero_sum',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            constraint='CONSTRAINT',
                            declare='DECLARE total numeric; credit numeric; lots numeric;',
                            operation='INSERT',
                            table='billing_ledgerentry',
                            timing='DEFERRABLE INITIALLY DEFERRED',
                            when='AFTER',
                            func=CHECK_TRANSACTION,
                            hash='a366232c9e23998f2694e6f6df89ed8604031a6e',
                            pgid='pgtrigger_entry_zero_sum_32cac',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='CreditLot',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='lot', primary_key=True, separator='_', serialize=False)),
                ('kind', models.CharField(choices=[('paid', 'Paid'), ('promotional', 'Promotional')], max_length=16)),
                ('reference', models.CharField(help_text='What it came from, e.g. stripe:pi:<id>.', max_length=200, null=True, unique=True)),
                ('amount_nano', models.BigIntegerField()),
                ('remaining_nano', models.BigIntegerField(default=0, help_text='Kept by trigger, from the movements.')),
                ('held_nano', models.BigIntegerField(default=0, help_text='Of what remains, set aside to be paid back.')),
                ('reversed_nano', models.BigIntegerField(default=0, help_text='Of the amount, paid back or taken back.')),
                ('priority', models.PositiveSmallIntegerField(help_text='Lower is spent first; then what expires first.')),
                ('expires_at', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('remaining_nano__gt', 0)), fields=['organization', 'priority', 'expires_at'], name='lot_spendable'),
                    models.Index(condition=models.Q(('remaining_nano__gt', 0)), fields=['expires_at'], name='lot_expiring'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('amount_nano__gt', 0), ('remaining_nano__gte', 0), ('remaining_nano__lte', models.F('amount_nano'))), name='lot_remaining_within'),
                    models.CheckConstraint(condition=models.Q(('held_nano__gte', 0), ('held_nano__lte', models.F('remaining_nano'))), name='lot_held_within'),
                    models.CheckConstraint(condition=models.Q(('reversed_nano__gte', 0), ('reversed_nano__lte', models.F('amount_nano'))), name='lot_reversed_within'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='lot_no_delete',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='DELETE',
                            table='billing_creditlot',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot delete rows from % table', TG_TABLE_NAME;",
                            hash='d88ea0e03d2bf6e9dc6e73d2f2a86ef801cd63f6',
                            pgid='pgtrigger_lot_no_delete_5b1d5',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='lot_frozen',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            condition='WHEN (OLD."kind" IS DISTINCT FROM (NEW."kind") OR OLD."reference" IS DISTINCT FROM (NEW."reference") OR OLD."amount_nano" IS DISTINCT FROM (NEW."amount_nano") OR OLD."priority" IS DISTINCT FROM (NEW."priority") OR OLD."expires_at" IS DISTINCT FROM (NEW."expires_at") OR OLD."created_at" IS DISTINCT FROM (NEW."created_at"))',
                            operation='UPDATE',
                            table='billing_creditlot',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update rows from % table', TG_TABLE_NAME;",
                            hash='6a913e6a98d84c74a34ea83cb09e39cd8bf5d2b4',
                            pgid='pgtrigger_lot_frozen_81a67',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='lot_remaining_by_movements',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            condition='WHEN (pg_trigger_depth() < 1)',
                            operation='UPDATE OF "remaining_nano"',
                            table='billing_creditlot',
                            when='BEFORE',
                            func='RAISE EXCEPTION \'pgtrigger: Cannot update of "remaining_nano" rows from % table\', TG_TABLE_NAME;',
                            hash='20f4b970de942e16719cd08cc118822b9e7ed277',
                            pgid='pgtrigger_lot_remaining_by_movements_8e862',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='Hold',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='hold', primary_key=True, separator='_', serialize=False)),
                ('purpose', models.CharField(choices=[('job', 'job'), ('inference', 'inference slice'), ('card_refund', 'card refund'), ('dispute', 'disputed payment')], max_length=16)),
                ('lot', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='billing.creditlot')),
                ('source', models.CharField(max_length=64)),
                ('price_rule', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.pricerule')),
                ('key_id', models.CharField(blank=True, help_text='Slices: the key that spends it.', max_length=40)),
                ('member_id', models.CharField(blank=True, help_text='Who started the job, or made the key.', max_length=40)),
                ('labels', models.JSONField(default=dict, help_text='Metadata labels it is charged back by, as they were then.')),
                ('amount_nano', models.BigIntegerField()),
                ('captured_nano', models.BigIntegerField(default=0)),
                ('refunded_nano', models.BigIntegerField(default=0, help_text='Of what was captured, given back later.')),
                ('invoiced_nano', models.BigIntegerField(default=0, help_text='Of what was captured less refunds, on invoices.')),
                ('used_nano', models.BigIntegerField(default=0, help_text='Slices: cost of the usage recorded against it so far.')),
                ('status', models.CharField(choices=[('open', 'open'), ('closed', 'closed')], default='open', max_length=12)),
                ('expires_at', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('closed_at', models.DateTimeField(null=True)),
                ('project_id', models.CharField(blank=True, db_default='', help_text='Of the job or key; empty: it is older than projects.', max_length=40)),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('purpose', 'inference'), ('status', 'open')), fields=['expires_at'], name='hold_open_slices'),
                    models.Index(condition=models.Q(('status', 'open')), fields=['organization', '-created_at', '-id'], name='hold_open'),
                    models.Index(condition=models.Q(('purpose', 'job')), fields=['source'], name='hold_of_job'),
                    models.Index(condition=models.Q(('purpose', 'job'), ('status', 'closed')), fields=['organization', 'closed_at'], include=('source', 'price_rule', 'captured_nano', 'refunded_nano'), name='hold_of_jobs_closed'),
                    models.Index(condition=models.Q(('purpose', 'job'), ('status', 'closed')), fields=['closed_at'], include=('price_rule', 'captured_nano', 'refunded_nano'), name='hold_closed_of_all'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('amount_nano__gt', 0), ('captured_nano__gte', 0), ('captured_nano__lte', models.F('amount_nano'))), name='hold_captured_within'),
                    models.CheckConstraint(condition=models.Q(('refunded_nano__gte', 0), ('refunded_nano__lte', models.F('captured_nano'))), name='hold_refunded_within'),
                    models.UniqueConstraint(condition=models.Q(('purpose', 'job'), ('status', 'open')), fields=('source',), name='hold_one_open_per_job'),
                    models.CheckConstraint(condition=models.Q(models.Q(('lot', None), ('purpose__in', ['job', 'inference'])), models.Q(('lot__isnull', False), ('purpose__in', ['card_refund', 'dispute'])), _connector='OR'), name='hold_of_lot'),
                ],
            },
        ),
        migrations.CreateModel(
            name='LotMovement',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('lot', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='movements', to='billing.creditlot')),
                ('transaction', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='lot_movements', to='billing.ledgertransaction')),
                ('amount_nano', models.BigIntegerField()),
            ],
            options={
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('amount_nano', 0), _negated=True), name='lot_movement_not_zero'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='lot_movement_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='billing_lotmovement',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='3c45b3aff67cb823bf2908c26fdf7ee7aa8765b5',
                            pgid='pgtrigger_lot_movement_append_only_8bd7d',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='lot_movement_remaining',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='INSERT',
                            table='billing_lotmovement',
                            when='AFTER',
                            func=ADD_TO_LOT,
                            hash='6bb4f53726c196dd442c5f1d68920c118f120418',
                            pgid='pgtrigger_lot_movement_remaining_00918',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='lot_movement_match',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            constraint='CONSTRAINT',
                            declare='DECLARE total numeric; credit numeric; lots numeric;',
                            operation='INSERT',
                            table='billing_lotmovement',
                            timing='DEFERRABLE INITIALLY DEFERRED',
                            when='AFTER',
                            func=CHECK_TRANSACTION,
                            hash='a433d16e3433fff059043379cc9a9525003429e4',
                            pgid='pgtrigger_lot_movement_match_aada1',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='LedgerSeal',
            fields=[
                ('day', models.DateField(primary_key=True, serialize=False)),
                ('entry_count', models.BigIntegerField()),
                ('previous_sha256', models.CharField(blank=True, max_length=64)),
                ('sha256', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='seal_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='billing_ledgerseal',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='a09b25c53012f95f1a7b9f0d9c85b0748632e938',
                            pgid='pgtrigger_seal_append_only_80add',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='UsageEvent',
            fields=[
                ('organization', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', models.CharField(max_length=40, primary_key=True, serialize=False)),
                ('key_id', models.CharField(max_length=40)),
                ('model_name', models.CharField(max_length=200)),
                ('adapter_version_id', models.CharField(blank=True, max_length=40)),
                ('slice_id', models.CharField(blank=True, help_text='The hold it was reserved from.', max_length=40)),
                ('input_price', models.ForeignKey(db_constraint=False, db_index=False, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.pricerule')),
                ('output_price', models.ForeignKey(db_constraint=False, db_index=False, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.pricerule')),
                ('input_tokens', models.BigIntegerField()),
                ('cached_input_tokens', models.BigIntegerField(default=0)),
                ('output_tokens', models.BigIntegerField()),
                ('finish', models.CharField(help_text='stop, length, aborted; a Refusal; lost: the gateway died meanwhile', max_length=16)),
                ('request_count', models.IntegerField(db_default=1, help_text='More than one: refused alike, and counted together.')),
                ('latency_ms', models.PositiveIntegerField(default=0)),
                ('first_token_ms', models.PositiveIntegerField(null=True)),
                ('occurred_at', models.DateTimeField()),
                ('replica_id', models.CharField(blank=True, db_default='', help_text='Which replica answered.', max_length=40)),
                ('engine_input_tokens', models.BigIntegerField(db_default=0)),
                ('engine_output_tokens', models.BigIntegerField(db_default=0)),
                ('output_bytes', models.BigIntegerField(help_text='Of the answer, as the gateway saw it.', null=True)),
                ('body_sha256', models.CharField(max_length=64)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', '-occurred_at'], name='usage_newest'),
                    django.contrib.postgres.indexes.BrinIndex(fields=['occurred_at'], name='usage_by_time'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('input_tokens__gte', 0), ('output_tokens__gte', 0)), name='usage_tokens_positive'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='usage_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='billing_usageevent',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='e08bcad7e0fd90867ba7d778fb3595f9cd2f3adf',
                            pgid='pgtrigger_usage_append_only_8caf4',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='UsageConflict',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('event_id', models.CharField(max_length=40)),
                ('body', models.JSONField()),
                ('body_sha256', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('event_id', 'body_sha256'), name='usage_conflict_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='usage_conflict_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='billing_usageconflict',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='62e7777db5af3cab6a0c5f2547bc8f592828cf8d',
                            pgid='pgtrigger_usage_conflict_append_only_7eb41',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='UsageSeries',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('sku', models.CharField(max_length=120)),
                ('price_rule', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.pricerule')),
                ('subject', models.CharField(help_text='The model it was used of, or what was stored.', max_length=200)),
                ('key_id', models.CharField(blank=True, max_length=40)),
                ('adapter_version_id', models.CharField(blank=True, max_length=40)),
                ('day', models.DateField()),
                ('quantity', models.BigIntegerField(default=0)),
                ('request_count', models.BigIntegerField(default=0)),
                ('rated_quantity', models.BigIntegerField(default=0, help_text='How much of the quantity is paid for.')),
                ('rated_request_count', models.BigIntegerField(default=0)),
                ('posted_nano', models.BigIntegerField(default=0)),
                ('invoiced_nano', models.BigIntegerField(default=0, help_text='Of what is posted, on invoices.')),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('request_count__gt', models.F('rated_request_count'))), fields=['organization'], name='usage_series_unrated'),
                    models.Index(fields=['organization', 'day'], name='usage_series_day'),
                    django.contrib.postgres.indexes.BrinIndex(fields=['day'], name='usage_series_by_day'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'price_rule', 'subject', 'key_id', 'adapter_version_id', 'day'), name='usage_series_once'),
                    models.CheckConstraint(condition=models.Q(('posted_nano__gte', 0), ('quantity__gte', 0)), name='usage_series_positive'),
                    models.CheckConstraint(condition=models.Q(('rated_quantity__lte', models.F('quantity')), ('rated_request_count__lte', models.F('request_count'))), name='usage_series_rated_within'),
                ],
            },
        ),
        migrations.CreateModel(
            name='StorageSample',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('hour_at', models.DateTimeField()),
                ('bytes', models.BigIntegerField()),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'hour_at'), name='storage_sample_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='storage_sample_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='billing_storagesample',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='9b38e28735fb6bd827b071700954627007a0c39d',
                            pgid='pgtrigger_storage_sample_append_only_64b07',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='VolumeRebate',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('price_rule', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.pricerule')),
                ('month', models.DateField()),
                ('quantity', models.BigIntegerField(default=0)),
                ('posted_nano', models.BigIntegerField(default=0)),
                ('invoiced_nano', models.BigIntegerField(default=0, help_text='Of what is posted, on invoices.')),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'price_rule', 'month'), name='volume_rebate_once'),
                    models.CheckConstraint(condition=models.Q(('posted_nano__gte', 0), ('quantity__gte', 0)), name='volume_rebate_positive'),
                ],
            },
        ),
        migrations.CreateModel(
            name='CreditRequest',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='creq', primary_key=True, separator='_', serialize=False)),
                ('status', models.CharField(choices=[('declined', 'declined'), ('granted', 'granted'), ('open', 'open')], default='open', max_length=12)),
                ('amount_nano', models.BigIntegerField()),
                ('note', models.CharField(blank=True, max_length=300)),
                ('granted_nano', models.BigIntegerField(null=True)),
                ('answer', models.CharField(blank=True, help_text="The operator's reason, which the customer reads.", max_length=300)),
                ('requested_by', models.CharField(max_length=64)),
                ('requested_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('decided_by', models.CharField(max_length=64, null=True)),
                ('decided_at', models.DateTimeField(null=True)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', '-requested_at'], name='credit_request_newest'),
                ],
                'constraints': [
                    models.UniqueConstraint(condition=models.Q(('status', 'open')), fields=('organization',), name='credit_request_one_open'),
                    models.CheckConstraint(condition=models.Q(('amount_nano__gt', 0)), name='credit_request_positive'),
                    models.CheckConstraint(condition=models.Q(models.Q(('decided_at', None), ('status', 'open')), models.Q(models.Q(('status', 'open'), _negated=True), ('decided_at__isnull', False)), _connector='OR'), name='credit_request_decided_pair'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='credit_request_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='billing_creditrequest',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{open:declined,open:granted}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='57336a3a9a3f6a85ac5bad70324312f5d8404aa9',
                            pgid='pgtrigger_credit_request_status_edad7',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='TrafficHour',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('model_name', models.CharField(blank=True, max_length=200)),
                ('adapter_version_id', models.CharField(blank=True, max_length=40)),
                ('key_id', models.CharField(blank=True, max_length=40)),
                ('hour_at', models.DateTimeField()),
                ('requests', models.BigIntegerField(help_text='All of them, however they ended.')),
                ('aborted', models.BigIntegerField(help_text='The client left before the end of its answer.')),
                ('rate_limited', models.BigIntegerField()),
                ('over_quota', models.BigIntegerField(help_text='No credit, or a budget is reached.')),
                ('not_found', models.BigIntegerField()),
                ('invalid', models.BigIntegerField(help_text='Refused for another reason with a 4xx status.')),
                ('failed', models.BigIntegerField(help_text="The platform's fault: 5xx, or the gateway died meanwhile.")),
                ('input_tokens', models.BigIntegerField()),
                ('cached_input_tokens', models.BigIntegerField()),
                ('output_tokens', models.BigIntegerField()),
                ('cost_nano', models.BigIntegerField(help_text='To a nano for each batch; the ledger has what was charged.')),
                ('first_token_counts', django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), size=None)),
                ('latency_counts', django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), help_text='Of whole answers.', size=None)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', 'hour_at'], name='traffic_hour_newest'),
                    django.contrib.postgres.indexes.BrinIndex(fields=['hour_at'], name='traffic_by_time'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'model_name', 'adapter_version_id', 'hour_at', 'key_id'), name='traffic_hour_once'),
                ],
            },
        ),
        migrations.RunSQL(LOCK_WALLET, reverse_sql="DROP FUNCTION ledger_lock_wallet"),
        migrations.RunSQL(POST, reverse_sql="DROP FUNCTION ledger_post"),
        migrations.RunSQL(VACUUM_OFTEN, migrations.RunSQL.noop),
    ]
