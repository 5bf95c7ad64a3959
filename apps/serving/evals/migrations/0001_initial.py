"""Evals, their runs and items."""

import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
        ('batches', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Eval',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='eval', primary_key=True, separator='_', serialize=False)),
                ('name', models.CharField(max_length=200)),
                ('metadata', models.JSONField(default=dict)),
                ('data_source_config', models.JSONField()),
                ('testing_criteria', models.JSONField()),
                ('bytes', models.PositiveIntegerField(db_default=0, default=0, help_text='Counts as storage.')),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project')),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', '-created_at', '-id'], name='eval_newest'),
                    models.Index(fields=['organization', '-updated_at', '-id'], name='eval_updated'),
                ],
            },
        ),
        migrations.CreateModel(
            name='EvalRun',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=34, prefix='evalrun', primary_key=True, separator='_', serialize=False)),
                ('evaluated', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='runs', to='evals.eval')),
                ('name', models.CharField(max_length=200)),
                ('metadata', models.JSONField(default=dict)),
                ('data_source', models.JSONField()),
                ('testing_criteria', models.JSONField(help_text='Those of the eval when the run was made.')),
                ('model_name', models.CharField(default='', max_length=200)),
                ('status', models.CharField(choices=[('canceled', 'canceled'), ('completed', 'completed'), ('failed', 'failed'), ('in_progress', 'in progress'), ('queued', 'queued')], default='queued', max_length=12)),
                ('phase', models.CharField(choices=[('sampling', 'sampling'), ('grading', 'grading')], default='', max_length=12)),
                ('attempts', models.PositiveSmallIntegerField(db_default=0, default=0, help_text='At its current step.')),
                ('batch', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='batches.batch')),
                ('error', models.JSONField(help_text='Why it failed: code, message.', null=True)),
                ('cost_limit_nano', models.BigIntegerField(help_text='Not begun if it may cost more.', null=True)),
                ('highest_cost_nano', models.BigIntegerField(help_text='The most that it can cost.', null=True)),
                ('total', models.PositiveIntegerField(default=0)),
                ('passed', models.PositiveIntegerField(default=0)),
                ('failed', models.PositiveIntegerField(default=0)),
                ('errored', models.PositiveIntegerField(default=0)),
                ('criteria_results', models.JSONField(default=list)),
                ('usage', models.JSONField(default=list, help_text='Tokens and calls by model.')),
                ('bytes', models.PositiveIntegerField(db_default=0, default=0, help_text='Counts as storage.')),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('finished_at', models.DateTimeField(null=True)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['evaluated', '-created_at', '-id'], name='eval_run_newest'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='eval_run_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='evals_evalrun',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{in_progress:canceled,in_progress:completed,in_progress:failed,queued:canceled,queued:failed,queued:in_progress}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='c936d36ddddc6a38c284ff9f98240c7bb802050c',
                            pgid='pgtrigger_eval_run_status_69da2',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='EvalItem',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=37, prefix='outputitem', primary_key=True, separator='_', serialize=False)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='items', to='evals.evalrun')),
                ('number', models.PositiveIntegerField()),
                ('source', models.TextField(help_text='JSON: the item, and its sample if it came with one.')),
                ('answers', models.TextField(default='{}', help_text='JSON: what models answered, by purpose.')),
                ('results', models.TextField(default='[]', help_text='JSON: a result for each criterion.')),
                ('status', models.CharField(choices=[('pending', 'pending'), ('pass', 'pass'), ('fail', 'fail'), ('error', 'error')], default='pending', max_length=8)),
                ('bytes', models.PositiveIntegerField(help_text='Counts as storage.')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization'], include=('bytes',), name='eval_item_bytes'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('run', 'number'), name='eval_item_once'),
                ],
            },
        ),
    ]
