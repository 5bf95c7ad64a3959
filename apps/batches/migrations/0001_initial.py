"""Batches, their requests and their files."""

import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='BatchFile',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='file', primary_key=True, separator='-', serialize=False)),
                ('purpose', models.CharField(max_length=24)),
                ('filename', models.CharField(max_length=255)),
                ('object_key', models.CharField(max_length=300)),
                ('bytes', models.BigIntegerField()),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('expires_at', models.DateTimeField(null=True)),
                ('deleted_at', models.DateTimeField(null=True)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project')),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('deleted_at', None)), fields=['organization', '-created_at', '-id'], name='batch_file_newest'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Batch',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='batch', primary_key=True, separator='_', serialize=False)),
                ('status', models.CharField(choices=[('cancelled', 'cancelled'), ('cancelling', 'cancelling'), ('completed', 'completed'), ('expired', 'expired'), ('failed', 'failed'), ('finalizing', 'finalizing'), ('in_progress', 'in progress'), ('validating', 'validating')], default='validating', max_length=12)),
                ('endpoint', models.CharField(max_length=40)),
                ('input_file', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='batches', to='batches.batchfile')),
                ('output_file', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='batches.batchfile')),
                ('error_file', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='batches.batchfile')),
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
                ('result_bytes', models.BigIntegerField(db_default=0, default=0, help_text='Size of the recorded answers.')),
                ('faults', models.PositiveSmallIntegerField(db_default=0, default=0, help_text='Errors of ours since the last answer.')),
                ('retry_at', models.DateTimeField(help_text='Left out until then, after an error of ours.', null=True)),
                ('eval_run', models.CharField(db_default='', default='', help_text="The run of an eval that asks; empty for a customer's own.", max_length=40)),
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
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project')),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', '-created_at', '-id'], name='batch_newest'),
                    models.Index(condition=models.Q(('status__in', ['validating', 'in_progress', 'finalizing', 'cancelling'])), fields=['organization', 'created_at'], name='batch_active'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='batch_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='batches_batch',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{cancelling:cancelled,cancelling:failed,finalizing:completed,finalizing:failed,in_progress:cancelling,in_progress:expired,in_progress:finalizing,validating:cancelling,validating:expired,validating:failed,validating:in_progress}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='30a6938555267644671a76e249dc28230b9187b1',
                            pgid='pgtrigger_batch_status_f0222',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='BatchRequest',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=36, prefix='batch_req', primary_key=True, separator='_', serialize=False)),
                ('batch', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='requests', to='batches.batch')),
                ('line', models.PositiveIntegerField()),
                ('custom_id', models.CharField(max_length=256)),
                ('offset', models.BigIntegerField(help_text='Where the line begins in the input file, in bytes.')),
                ('bytes', models.PositiveIntegerField()),
                ('status', models.CharField(choices=[('pending', 'pending'), ('completed', 'completed'), ('failed', 'failed')], default='pending', max_length=12)),
                ('failures', models.PositiveSmallIntegerField(default=0, help_text='Answers of 5xx so far.')),
                ('result', models.TextField(default='', help_text='Its line of the output or error file.')),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('status', 'pending')), fields=['batch', 'line'], name='batch_request_pending'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('batch', 'line'), name='batch_request_once'),
                ],
            },
        ),
    ]
