"""Batches, their requests and their files."""

import apps.batches.lifecycle
import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
import pgtrigger.migrations
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('accounts', '0010_user_language'),
    ]

    operations = [
        migrations.CreateModel(
            name='BatchFile',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='file', primary_key=True, separator='-', serialize=False)),
                ('purpose', models.CharField(max_length=24)),
                ('filename', models.CharField(max_length=255)),
                ('object_key', models.CharField(max_length=300)),
                ('bytes', models.BigIntegerField()),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('expires_at', models.DateTimeField(null=True)),
                ('deleted_at', models.DateTimeField(null=True)),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
            ],
        ),
        migrations.CreateModel(
            name='Batch',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='batch', primary_key=True, separator='_', serialize=False)),
                ('status', models.CharField(choices=[(apps.batches.lifecycle.BatchStatus['CANCELLED'], 'cancelled'), (apps.batches.lifecycle.BatchStatus['CANCELLING'], 'cancelling'), (apps.batches.lifecycle.BatchStatus['COMPLETED'], 'completed'), (apps.batches.lifecycle.BatchStatus['EXPIRED'], 'expired'), (apps.batches.lifecycle.BatchStatus['FAILED'], 'failed'), (apps.batches.lifecycle.BatchStatus['FINALIZING'], 'finalizing'), (apps.batches.lifecycle.BatchStatus['IN_PROGRESS'], 'in progress'), (apps.batches.lifecycle.BatchStatus['VALIDATING'], 'validating')], default=apps.batches.lifecycle.BatchStatus['VALIDATING'], max_length=12)),
                ('endpoint', models.CharField(max_length=40)),
                ('output_expires_after_seconds', models.PositiveIntegerField(null=True)),
                ('metadata', models.JSONField(null=True)),
                ('model_name', models.CharField(default='', help_text='The model of the first request.', max_length=200)),
                ('errors', models.JSONField(default=list, help_text='Why it failed: line, code, message, param.')),
                ('stop', models.JSONField(help_text='Why no more requests are sent: code, message.', null=True)),
                ('total', models.PositiveIntegerField(default=0)),
                ('completed', models.PositiveIntegerField(default=0)),
                ('failed', models.PositiveIntegerField(default=0)),
                ('input_tokens', models.BigIntegerField(default=0)),
                ('cached_tokens', models.BigIntegerField(default=0)),
                ('output_tokens', models.BigIntegerField(default=0)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('expires_at', models.DateTimeField()),
                ('in_progress_at', models.DateTimeField(null=True)),
                ('finalizing_at', models.DateTimeField(null=True)),
                ('cancelling_at', models.DateTimeField(null=True)),
                ('completed_at', models.DateTimeField(null=True)),
                ('failed_at', models.DateTimeField(null=True)),
                ('expired_at', models.DateTimeField(null=True)),
                ('cancelled_at', models.DateTimeField(null=True)),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('error_file', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='batches.batchfile')),
                ('input_file', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='batches', to='batches.batchfile')),
                ('output_file', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='batches.batchfile')),
            ],
        ),
        migrations.CreateModel(
            name='BatchRequest',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=36, prefix='batch_req', primary_key=True, separator='_', serialize=False)),
                ('line', models.PositiveIntegerField()),
                ('custom_id', models.CharField(max_length=256)),
                ('offset', models.BigIntegerField(help_text='Where the line begins in the input file, in bytes.')),
                ('bytes', models.PositiveIntegerField()),
                ('status', models.CharField(choices=[('pending', 'pending'), ('completed', 'completed'), ('failed', 'failed')], default=apps.batches.lifecycle.RequestStatus['PENDING'], max_length=12)),
                ('failures', models.PositiveSmallIntegerField(default=0, help_text='Answers of 5xx so far.')),
                ('result', models.TextField(default='', help_text='Its line of the output or error file.')),
                ('batch', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='requests', to='batches.batch')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
            ],
        ),
        migrations.AddIndex(
            model_name='batchfile',
            index=models.Index(condition=models.Q(('deleted_at', None)), fields=['organization', '-created_at', '-id'], name='batch_file_newest'),
        ),
        migrations.AddIndex(
            model_name='batch',
            index=models.Index(fields=['organization', '-created_at', '-id'], name='batch_newest'),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='batch',
            trigger=pgtrigger.compiler.Trigger(name='batch_status', sql=pgtrigger.compiler.UpsertTriggerSql(declare='DECLARE _is_valid_transition BOOLEAN;', func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{cancelling:cancelled,finalizing:completed,in_progress:cancelling,in_progress:expired,in_progress:finalizing,validating:cancelling,validating:expired,validating:failed,validating:in_progress}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;', hash='ce3a1d8998b967b017bbfdeaec0a7ce664544110', operation='UPDATE', pgid='pgtrigger_batch_status_f0222', table='batches_batch', when='BEFORE')),
        ),
        migrations.AddIndex(
            model_name='batchrequest',
            index=models.Index(condition=models.Q(('status', 'pending')), fields=['batch', 'line'], name='batch_request_pending'),
        ),
        migrations.AddConstraint(
            model_name='batchrequest',
            constraint=models.UniqueConstraint(fields=('batch', 'line'), name='batch_request_once'),
        ),
    ]
