"""Evals, their runs and items."""

import apps.core.ids
import apps.serving.evals.lifecycle
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
import pgtrigger.migrations
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('accounts', '0013_pending_deliveries'),
        ('batches', '0003_eval_runs'),
    ]

    operations = [
        migrations.CreateModel(
            name='Eval',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='eval', primary_key=True, separator='_', serialize=False)),
                ('name', models.CharField(max_length=200)),
                ('metadata', models.JSONField(default=dict)),
                ('data_source_config', models.JSONField()),
                ('testing_criteria', models.JSONField()),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
            ],
        ),
        migrations.CreateModel(
            name='EvalRun',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=34, prefix='evalrun', primary_key=True, separator='_', serialize=False)),
                ('name', models.CharField(max_length=200)),
                ('metadata', models.JSONField(default=dict)),
                ('data_source', models.JSONField()),
                ('testing_criteria', models.JSONField(help_text='Those of the eval when the run was made.')),
                ('model_name', models.CharField(default='', max_length=200)),
                ('status', models.CharField(choices=[(apps.serving.evals.lifecycle.EvalRunStatus['CANCELED'], 'canceled'), (apps.serving.evals.lifecycle.EvalRunStatus['COMPLETED'], 'completed'), (apps.serving.evals.lifecycle.EvalRunStatus['FAILED'], 'failed'), (apps.serving.evals.lifecycle.EvalRunStatus['IN_PROGRESS'], 'in progress'), (apps.serving.evals.lifecycle.EvalRunStatus['QUEUED'], 'queued')], default=apps.serving.evals.lifecycle.EvalRunStatus['QUEUED'], max_length=12)),
                ('phase', models.CharField(choices=[('sampling', 'sampling'), ('grading', 'grading')], default='', max_length=12)),
                ('error', models.JSONField(help_text='Why it failed: code, message.', null=True)),
                ('cost_limit_nano', models.BigIntegerField(help_text='Not begun if it may cost more.', null=True)),
                ('highest_cost_nano', models.BigIntegerField(help_text='The most that it can cost.', null=True)),
                ('total', models.PositiveIntegerField(default=0)),
                ('passed', models.PositiveIntegerField(default=0)),
                ('failed', models.PositiveIntegerField(default=0)),
                ('errored', models.PositiveIntegerField(default=0)),
                ('criteria_results', models.JSONField(default=list)),
                ('usage', models.JSONField(default=list, help_text='Tokens and calls by model.')),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('finished_at', models.DateTimeField(null=True)),
                ('batch', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='batches.batch')),
                ('evaluated', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='runs', to='evals.eval')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
            ],
        ),
        migrations.CreateModel(
            name='EvalItem',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=37, prefix='outputitem', primary_key=True, separator='_', serialize=False)),
                ('number', models.PositiveIntegerField()),
                ('source', models.TextField(help_text='JSON: the item, and its sample if it came with one.')),
                ('answers', models.TextField(default='{}', help_text='JSON: what models answered, by purpose.')),
                ('results', models.TextField(default='[]', help_text='JSON: a result for each criterion.')),
                ('status', models.CharField(choices=[('pending', 'pending'), ('pass', 'pass'), ('fail', 'fail'), ('error', 'error')], default=apps.serving.evals.lifecycle.ItemStatus['PENDING'], max_length=8)),
                ('bytes', models.PositiveIntegerField(help_text='Counts as storage.')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='items', to='evals.evalrun')),
            ],
        ),
        migrations.AddIndex(
            model_name='eval',
            index=models.Index(fields=['organization', '-created_at', '-id'], name='eval_newest'),
        ),
        migrations.AddIndex(
            model_name='eval',
            index=models.Index(fields=['organization', '-updated_at', '-id'], name='eval_updated'),
        ),
        migrations.AddIndex(
            model_name='evalrun',
            index=models.Index(fields=['evaluated', '-created_at', '-id'], name='eval_run_newest'),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='evalrun',
            trigger=pgtrigger.compiler.Trigger(name='eval_run_status', sql=pgtrigger.compiler.UpsertTriggerSql(declare='DECLARE _is_valid_transition BOOLEAN;', func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{in_progress:canceled,in_progress:completed,in_progress:failed,queued:canceled,queued:failed,queued:in_progress}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;', hash='c936d36ddddc6a38c284ff9f98240c7bb802050c', operation='UPDATE', pgid='pgtrigger_eval_run_status_69da2', table='evals_evalrun', when='BEFORE')),
        ),
        migrations.AddIndex(
            model_name='evalitem',
            index=models.Index(fields=['organization'], include=('bytes',), name='eval_item_bytes'),
        ),
        migrations.AddConstraint(
            model_name='evalitem',
            constraint=models.UniqueConstraint(fields=('run', 'number'), name='eval_item_once'),
        ),
    ]
