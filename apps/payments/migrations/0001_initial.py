"""What Stripe and we owe each other: top-ups, refunds, disputes, reconciliation."""

import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
        ('billing', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='StripeCustomer',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='cust', primary_key=True, separator='_', serialize=False)),
                ('stripe_id', models.CharField(max_length=255, unique=True)),
                ('payment_method_id', models.CharField(blank=True, max_length=255)),
                ('card_brand', models.CharField(blank=True, max_length=40)),
                ('card_last4', models.CharField(blank=True, max_length=4)),
                ('card_exp_month', models.PositiveSmallIntegerField(null=True)),
                ('card_exp_year', models.PositiveSmallIntegerField(null=True)),
                ('newest_method_id', models.CharField(blank=True, help_text='The card left last, of all pages.', max_length=255)),
                ('newest_left_at', models.DateTimeField(help_text="When it was, by Stripe's clock.", null=True)),
                ('is_newest_chosen', models.BooleanField(default=False, help_text='Left to be charged later, not merely paid with.')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization',), name='stripe_customer_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='TopUp',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='topup', primary_key=True, separator='_', serialize=False)),
                ('origin', models.CharField(choices=[('user', 'by a person'), ('auto', 'auto-recharge')], max_length=8)),
                ('amount_cents', models.PositiveIntegerField(help_text='The credit; tax comes on top.')),
                ('tax_cents', models.PositiveIntegerField(default=0)),
                ('status', models.CharField(choices=[('action_required', 'action required'), ('expired', 'expired'), ('failed', 'failed'), ('open', 'open'), ('paid', 'paid'), ('requested', 'requested')], default='requested', max_length=16)),
                ('requested_by', models.CharField(max_length=64)),
                ('checkout_id', models.CharField(max_length=255, null=True, unique=True)),
                ('invoice_id', models.CharField(max_length=255, null=True, unique=True)),
                ('payment_intent_id', models.CharField(max_length=255, null=True, unique=True)),
                ('pay_url', models.URLField(blank=True, help_text='Where its owner confirms an automatic charge.', max_length=2000)),
                ('failure', models.CharField(blank=True, max_length=200)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('paid_at', models.DateTimeField(null=True)),
                ('declined_at', models.DateTimeField(help_text='When the bank declined an automatic charge.', null=True)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', '-created_at'], name='topup_newest'),
                    models.Index(condition=models.Q(('status__in', ('requested', 'open', 'action_required'))), fields=['created_at'], name='topup_in_flight'),
                    models.Index(fields=['-created_at'], name='topup_newest_of_all'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('amount_cents__gt', 0)), name='topup_positive'),
                    models.CheckConstraint(condition=models.Q(models.Q(('status', 'paid'), ('paid_at__isnull', False)), models.Q(models.Q(('status', 'paid'), _negated=True), ('paid_at', None)), _connector='OR'), name='topup_paid_at'),
                    models.UniqueConstraint(condition=models.Q(('origin', 'auto'), ('status__in', ('requested', 'open', 'action_required'))), fields=('organization',), name='topup_one_auto_in_flight'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='topup_moves',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='payments_topup',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{action_required:expired,action_required:failed,action_required:paid,expired:paid,failed:paid,open:expired,open:failed,open:paid,requested:action_required,requested:expired,requested:failed,requested:open,requested:paid}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='ee73249feae2f1128cbc1b12d887e72bb0909ece',
                            pgid='pgtrigger_topup_moves_65c3f',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='topup_kept',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='DELETE',
                            table='payments_topup',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot delete rows from % table', TG_TABLE_NAME;",
                            hash='f72eb47dcd90f8b3f37276148c9a5ee3adb14eac',
                            pgid='pgtrigger_topup_kept_b28f8',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='HostedPage',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='page', primary_key=True, separator='_', serialize=False)),
                ('kind', models.CharField(choices=[('topup', 'top-up'), ('card', 'card'), ('portal', 'portal')], max_length=8)),
                ('topup', models.OneToOneField(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='page', to='payments.topup')),
                ('status', models.CharField(choices=[('failed', 'failed'), ('ready', 'ready'), ('requested', 'requested')], default='requested', max_length=12)),
                ('stripe_id', models.CharField(blank=True, max_length=255)),
                ('url', models.URLField(blank=True, max_length=2000)),
                ('failure', models.CharField(blank=True, max_length=200)),
                ('requested_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('status', 'requested')), fields=['created_at'], name='hosted_page_waiting'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='hosted_page_moves',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='payments_hostedpage',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{requested:failed,requested:ready}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='39ffe4d4ba96d1674141b67833fda667a138e7ea',
                            pgid='pgtrigger_hosted_page_moves_2e8dc',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='CardRefund',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=33, prefix='refund', primary_key=True, separator='_', serialize=False)),
                ('topup', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='refunds', to='payments.topup')),
                ('credit_cents', models.PositiveIntegerField()),
                ('tax_cents', models.PositiveIntegerField(default=0)),
                ('status', models.CharField(choices=[('failed', 'failed'), ('pending', 'pending'), ('requested', 'requested'), ('succeeded', 'succeeded'), ('waiting', 'waiting')], default='requested', max_length=12)),
                ('hold_id', models.CharField(blank=True, help_text='Empty when it was made at Stripe, not here.', max_length=40)),
                ('stripe_id', models.CharField(max_length=255, null=True, unique=True)),
                ('reason', models.CharField(max_length=300)),
                ('needs_approval', models.BooleanField(db_default=False)),
                ('requested_by', models.CharField(max_length=64)),
                ('approved_by', models.CharField(max_length=64, null=True)),
                ('failure', models.CharField(blank=True, max_length=200)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('status', 'requested')), fields=['created_at'], name='card_refund_waiting'),
                    models.Index(fields=['-created_at', '-id'], name='card_refund_newest_of_all'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('credit_cents__gt', 0)), name='card_refund_positive'),
                    models.CheckConstraint(condition=models.Q(('needs_approval', False), ('status__in', ['waiting', 'failed']), models.Q(('approved_by__isnull', False), models.Q(('approved_by', models.F('requested_by')), _negated=True)), _connector='OR'), name='card_refund_by_two'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='card_refund_moves',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='payments_cardrefund',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{pending:failed,pending:succeeded,requested:failed,requested:pending,requested:succeeded,succeeded:failed,waiting:failed,waiting:requested}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='13d89601959d1100be9453402cb233cb0143386a',
                            pgid='pgtrigger_card_refund_moves_1421d',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='card_refund_kept',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='DELETE',
                            table='payments_cardrefund',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot delete rows from % table', TG_TABLE_NAME;",
                            hash='b5515696b8ee42e4f127a8b30adc1961dbb41265',
                            pgid='pgtrigger_card_refund_kept_9a903',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='card_refund_frozen',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            condition='WHEN (OLD."credit_cents" IS DISTINCT FROM (NEW."credit_cents") OR OLD."needs_approval" IS DISTINCT FROM (NEW."needs_approval") OR OLD."requested_by" IS DISTINCT FROM (NEW."requested_by"))',
                            operation='UPDATE',
                            table='payments_cardrefund',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update rows from % table', TG_TABLE_NAME;",
                            hash='e2a28014807c856127d3e5b1c9bb2a40e20d0c13',
                            pgid='pgtrigger_card_refund_frozen_c560d',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='CardDispute',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=34, prefix='dispute', primary_key=True, separator='_', serialize=False)),
                ('topup', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='disputes', to='payments.topup')),
                ('stripe_id', models.CharField(max_length=255, unique=True)),
                ('status', models.CharField(help_text="Stripe's own word.", max_length=40)),
                ('reason', models.CharField(blank=True, max_length=80)),
                ('amount_cents', models.PositiveIntegerField()),
                ('movements_seen', models.PositiveSmallIntegerField(default=0, help_text='Cash movements posted so far, in order.')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='card_dispute_kept',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='DELETE',
                            table='payments_carddispute',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot delete rows from % table', TG_TABLE_NAME;",
                            hash='7a34882ff910bb003e8f2f741c3b682eed18c9e9',
                            pgid='pgtrigger_card_dispute_kept_99fcf',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='StripeEvent',
            fields=[
                ('id', models.CharField(max_length=255, primary_key=True, serialize=False)),
                ('type', models.CharField(max_length=80)),
                ('api_version', models.CharField(blank=True, max_length=40)),
                ('object_id', models.CharField(max_length=255)),
                ('object_type', models.CharField(max_length=80)),
                ('created_at', models.DateTimeField(help_text="By Stripe's clock.")),
                ('received_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('status', models.CharField(choices=[('done', 'done'), ('ignored', 'ignored'), ('received', 'received')], default='received', max_length=12)),
                ('attempts', models.PositiveSmallIntegerField(default=0)),
                ('last_error', models.CharField(blank=True, max_length=300)),
                ('customer_id', models.CharField(blank=True, db_default='', help_text='The customer in whose turn it is handled; empty: all such events share one turn.', max_length=255)),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('status', 'received')), fields=['received_at'], name='stripe_event_waiting'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='stripe_event_moves',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='payments_stripeevent',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{received:done,received:ignored}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='1c25b99551e35586703bcd2eee458fe60d980a91',
                            pgid='pgtrigger_stripe_event_moves_a0052',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='stripe_event_frozen',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            condition='WHEN (OLD."id" IS DISTINCT FROM (NEW."id") OR OLD."type" IS DISTINCT FROM (NEW."type") OR OLD."object_id" IS DISTINCT FROM (NEW."object_id") OR OLD."object_type" IS DISTINCT FROM (NEW."object_type") OR OLD."created_at" IS DISTINCT FROM (NEW."created_at"))',
                            operation='UPDATE',
                            table='payments_stripeevent',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update rows from % table', TG_TABLE_NAME;",
                            hash='47a6674b1271a1dad84d283e3d9c638a94aa3802',
                            pgid='pgtrigger_stripe_event_frozen_17e02',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='Reconciliation',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='recon', primary_key=True, separator='_', serialize=False)),
                ('kind', models.CharField(choices=[('hourly', 'hourly'), ('daily', 'daily')], max_length=8)),
                ('since', models.DateTimeField()),
                ('until', models.DateTimeField()),
                ('movement_count', models.PositiveIntegerField()),
                ('ours_cents', models.BigIntegerField(help_text='What the books say moved, gross.')),
                ('theirs_cents', models.BigIntegerField(help_text='What Stripe says moved, gross.')),
                ('missed_events', models.PositiveIntegerField(default=0, help_text='Webhooks that never came, read from its list.')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(fields=['-created_at'], name='reconciliation_newest'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='reconciliation_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='payments_reconciliation',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='59ac8fae7cdbdd2df8b65033eb17fcb8f908bd54',
                            pgid='pgtrigger_reconciliation_append_only_1e920',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='ReconciliationDifference',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='diff', primary_key=True, separator='_', serialize=False)),
                ('source_id', models.CharField(help_text='Payment, refund or dispute at Stripe.', max_length=255, unique=True)),
                ('ours_cents', models.BigIntegerField()),
                ('theirs_cents', models.BigIntegerField()),
                ('found_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('resolved_at', models.DateTimeField(null=True)),
                ('resolved_by', models.CharField(blank=True, max_length=64)),
                ('note', models.CharField(blank=True, max_length=300)),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('resolved_at', None)), fields=['-found_at'], name='difference_open'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(models.Q(('resolved_at', None), ('resolved_by', '')), models.Q(('resolved_at__isnull', False), models.Q(('resolved_by', ''), _negated=True)), _connector='OR'), name='difference_resolved_pair'),
                ],
            },
        ),
        migrations.CreateModel(
            name='AutoRecharge',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=35, prefix='recharge', primary_key=True, separator='_', serialize=False)),
                ('is_enabled', models.BooleanField(default=False)),
                ('threshold_cents', models.PositiveIntegerField(default=1000)),
                ('amount_cents', models.PositiveIntegerField(default=5000)),
                ('monthly_cap_cents', models.PositiveIntegerField(default=20000)),
                ('failures', models.PositiveSmallIntegerField(default=0, help_text='Charges declined in a row.')),
                ('paused_until', models.DateTimeField(null=True)),
                ('stopped_because', models.CharField(blank=True, max_length=200)),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('is_enabled', True)), fields=['id'], name='auto_recharge_enabled'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('organization',), name='auto_recharge_once'),
                    models.CheckConstraint(condition=models.Q(('amount_cents__gt', 0), ('monthly_cap_cents__gte', models.F('amount_cents'))), name='auto_recharge_cap_covers_one'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Standing',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=35, prefix='standing', primary_key=True, separator='_', serialize=False)),
                ('status', models.CharField(choices=[('active', 'active'), ('grace', 'grace'), ('suspended', 'suspended')], default='active', max_length=12)),
                ('since_at', models.DateTimeField()),
                ('notices_sent', models.PositiveSmallIntegerField(default=0, help_text='Of this debt.')),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization',), name='standing_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='standing_moves',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='payments_standing',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{active:grace,grace:active,grace:suspended,suspended:active}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='d7a397a2e8ac4a4ed698a36b38f745187591d898',
                            pgid='pgtrigger_standing_moves_83637',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='MeterMirror',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('series', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, primary_key=True, related_name='+', serialize=False, to='billing.usageseries')),
                ('sent_quantity', models.BigIntegerField(default=0)),
                ('sending_quantity', models.BigIntegerField(default=0, help_text='The sum the last event brings the meter to.')),
            ],
            options={
                'abstract': False,
            },
        ),
    ]
