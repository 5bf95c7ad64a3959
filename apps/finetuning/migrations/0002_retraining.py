"""Retrainings and their plans, and the fleet of a machine. They name serving and evals, which need pools first."""

import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
        ('adapters', '0001_initial'),
        ('datasets', '0001_initial'),
        ('evals', '0001_initial'),
        ('finetuning', '0001_initial'),
        ('serving', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='RetrainingPlan',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=34, prefix='retplan', primary_key=True, separator='_', serialize=False)),
                ('name', models.CharField(max_length=80)),
                ('testing_criteria', models.JSONField(help_text='Of the eval: a row is passed if its answer passes all of them.')),
                ('cadence', models.CharField(blank=True, choices=[('days', 'days'), ('week', 'week'), ('month', 'month')], max_length=8)),
                ('cadence_value', models.PositiveSmallIntegerField(help_text='Days, a day of the week, or of the month.', null=True)),
                ('hour_utc', models.PositiveSmallIntegerField(default=0)),
                ('min_new_rows', models.PositiveIntegerField(help_text='Begin when a version has so many more rows.', null=True)),
                ('max_nano', models.BigIntegerField(help_text='The most that one retraining costs, with its comparisons.')),
                ('min_gain_points', models.FloatField(help_text='Of the held-out rows, in percentage points.')),
                ('max_loss_points', models.FloatField(help_text='Of the regression rows, in percentage points.', null=True)),
                ('is_enabled', models.BooleanField(default=True)),
                ('next_due_at', models.DateTimeField(null=True)),
                ('seen_number', models.PositiveIntegerField(default=0, help_text='Of the version that growth is counted from.')),
                ('seen_rows', models.BigIntegerField(default=0)),
                ('acts_as', models.CharField(help_text='Who changed it last: retrainings act in that name.', max_length=64)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('alias', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='serving.alias')),
                ('dataset', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='datasets.dataset')),
                ('evaluated', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='evals.eval')),
                ('held_out', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='datasets.dataset')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('regression', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='datasets.dataset')),
                ('source_job', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='finetuning.finetuningjob')),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'name'), name='retraining_plan_name_once'),
                    models.CheckConstraint(condition=models.Q(models.Q(('cadence', ''), _negated=True), ('min_new_rows__isnull', False), _connector='OR'), name='retraining_plan_has_trigger'),
                    models.CheckConstraint(condition=models.Q(models.Q(('cadence', ''), ('cadence_value', None), ('next_due_at', None)), models.Q(models.Q(('cadence', ''), _negated=True), ('cadence_value__isnull', False), ('next_due_at__isnull', False)), _connector='OR'), name='retraining_plan_schedule'),
                    models.CheckConstraint(condition=models.Q(models.Q(('max_loss_points', None), ('regression', None)), models.Q(('max_loss_points__isnull', False), ('regression__isnull', False)), _connector='OR'), name='retraining_plan_regression'),
                    models.CheckConstraint(condition=models.Q(('max_nano__gt', 0)), name='retraining_plan_price'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Retraining',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=34, prefix='retrain', primary_key=True, separator='_', serialize=False)),
                ('trigger', models.CharField(choices=[('schedule', 'schedule'), ('growth', 'growth'), ('request', 'request')], max_length=8)),
                ('trigger_key', models.CharField(help_text='What began it: nothing begins two.', max_length=100)),
                ('status', models.CharField(choices=[('checking', 'checking'), ('comparing', 'comparing'), ('failed', 'failed'), ('kept', 'kept'), ('promoted', 'promoted'), ('promoting', 'promoting'), ('refused', 'refused'), ('skipped', 'skipped'), ('training', 'training'), ('waiting', 'waiting')], default='waiting', max_length=10)),
                ('max_nano', models.BigIntegerField(help_text="The plan's when it began.")),
                ('comparison_nano', models.BigIntegerField(default=0, help_text='The most that its comparisons may cost so far.')),
                ('held_out_result', models.JSONField(help_text='apps.contracts.evaluation.paired_shares.PairedShares', null=True)),
                ('regression_result', models.JSONField(null=True)),
                ('code', models.CharField(blank=True, max_length=48)),
                ('reason', models.CharField(blank=True, max_length=500)),
                ('attempts', models.PositiveSmallIntegerField(default=0, help_text='At its current step.')),
                ('next_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), help_text='When its step is tried or looked at again.')),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('finished_at', models.DateTimeField(null=True)),
                ('held_out_file', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='datasets.datasetversion')),
                ('job', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='finetuning.finetuningjob')),
                ('new_run', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='evals.evalrun')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('production', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='adapters.adapterversion')),
                ('production_run', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='evals.evalrun')),
                ('regression_file', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='datasets.datasetversion')),
                ('training_file', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='datasets.datasetversion')),
                ('plan', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='retrainings', to='finetuning.retrainingplan')),
            ],
            options={
                'indexes': [
                    models.Index(fields=['plan', '-created_at', '-id'], name='retraining_newest'),
                    models.Index(condition=models.Q(('finished_at', None)), fields=['next_at'], name='retraining_open'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('plan', 'trigger_key'), name='retraining_once'),
                    models.UniqueConstraint(condition=models.Q(('status__in', ('waiting', 'training', 'comparing', 'checking', 'promoting'))), fields=('plan',), name='retraining_one_open'),
                    models.CheckConstraint(condition=models.Q(models.Q(('finished_at', None), ('status__in', ('waiting', 'training', 'comparing', 'checking', 'promoting'))), models.Q(models.Q(('status__in', ('waiting', 'training', 'comparing', 'checking', 'promoting')), _negated=True), ('finished_at__isnull', False)), _connector='OR'), name='retraining_finished'),
                    models.CheckConstraint(condition=models.Q(('comparison_nano__lte', models.F('max_nano'))), name='retraining_comparison_within_maximum'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='retraining_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='finetuning_retraining',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{checking:failed,checking:kept,checking:promoting,comparing:checking,comparing:failed,comparing:kept,comparing:promoting,promoting:kept,promoting:promoted,training:comparing,training:failed,training:refused,waiting:refused,waiting:skipped,waiting:training}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='331ec329cec8362f14e1ca360fb49c7b9d1860b6',
                            pgid='pgtrigger_retraining_status_f33d2',
                        ),
                    ),
                ],
            },
        ),
        migrations.AddField(
            model_name='capacitynode',
            name='fleet',
            field=models.ForeignKey(help_text='Null: it trains.', null=True, on_delete=django.db.models.deletion.CASCADE, related_name='nodes', to='serving.replicafleet'),
        ),
    ]
