"""Requests for credit; lots that no payment made have a reference too."""

import apps.billing.models.invoices
import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
import pgtrigger.migrations
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0005_share'),
        ('billing', '0003_posting_kinds'),
    ]

    operations = [
        migrations.AlterField(
            model_name='creditlot',
            name='reference',
            field=models.CharField(help_text='What it came from, e.g. stripe:pi:<id>.', max_length=200, null=True, unique=True),
        ),
        migrations.CreateModel(
            name='CreditRequest',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='creq', primary_key=True, separator='_', serialize=False)),
                ('status', models.CharField(choices=[(apps.billing.models.invoices.CreditRequestStatus['DECLINED'], 'declined'), (apps.billing.models.invoices.CreditRequestStatus['GRANTED'], 'granted'), (apps.billing.models.invoices.CreditRequestStatus['OPEN'], 'open')], default=apps.billing.models.invoices.CreditRequestStatus['OPEN'], max_length=12)),
                ('amount_nano', models.BigIntegerField()),
                ('note', models.CharField(blank=True, max_length=300)),
                ('granted_nano', models.BigIntegerField(null=True)),
                ('answer', models.CharField(blank=True, help_text="The operator's reason, which the customer reads.", max_length=300)),
                ('requested_by', models.CharField(max_length=64)),
                ('requested_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('decided_by', models.CharField(max_length=64, null=True)),
                ('decided_at', models.DateTimeField(null=True)),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
            ],
            options={
                'indexes': [models.Index(fields=['organization', '-requested_at'], name='credit_request_newest')],
                'constraints': [models.UniqueConstraint(condition=models.Q(('status', apps.billing.models.invoices.CreditRequestStatus['OPEN'])), fields=('organization',), name='credit_request_one_open'), models.CheckConstraint(condition=models.Q(('amount_nano__gt', 0)), name='credit_request_positive'), models.CheckConstraint(condition=models.Q(models.Q(('decided_at', None), ('status', apps.billing.models.invoices.CreditRequestStatus['OPEN'])), models.Q(models.Q(('status', apps.billing.models.invoices.CreditRequestStatus['OPEN']), _negated=True), ('decided_at__isnull', False)), _connector='OR'), name='credit_request_decided_pair')],
            },
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='creditrequest',
            trigger=pgtrigger.compiler.Trigger(name='credit_request_status', sql=pgtrigger.compiler.UpsertTriggerSql(declare='DECLARE _is_valid_transition BOOLEAN;', func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{open:declined,open:granted}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;', hash='57336a3a9a3f6a85ac5bad70324312f5d8404aa9', operation='UPDATE', pgid='pgtrigger_credit_request_status_edad7', table='billing_creditrequest', when='BEFORE')),
        ),
    ]
