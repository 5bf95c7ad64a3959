"""Add elastic pools: the limits of a pool, and the nodes that were requested for it."""

import apps.core.ids
import apps.finetuning.lifecycle
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
import pgtrigger.migrations
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('finetuning', '0011_memory_rehearsals'),
    ]

    operations = [
        migrations.CreateModel(
            name='PoolCapacity',
            fields=[
                ('pool', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='capacity', serialize=False, to='finetuning.gpupool')),
                ('kind', models.CharField(choices=[('static', 'You: machines join by hand'), ('slurm', 'Slurm: Anneal submits and cancels jobs')], default='static', max_length=10)),
                ('minimum', models.PositiveSmallIntegerField(default=0)),
                ('maximum', models.PositiveSmallIntegerField(default=1)),
                ('gpus_per_node', models.PositiveSmallIntegerField(default=1)),
                ('idle_seconds', models.PositiveIntegerField(default=300, help_text='A node without work for so long is released.')),
                ('node_nano_per_hour', models.BigIntegerField(default=0, help_text='What one node costs the operator.')),
                ('budget_nano_per_hour', models.BigIntegerField(help_text='Null: only the maximum limits the nodes.', null=True)),
                ('settings', models.JSONField(default=dict, help_text='Of the engine, as its Struct says.')),
                ('wanted', models.PositiveSmallIntegerField(default=0, help_text='By the last reconciliation.')),
                ('failures', models.PositiveSmallIntegerField(default=0, help_text='Of starts in a row; each doubles the wait.')),
                ('retry_at', models.DateTimeField(help_text='Nothing is requested before.', null=True)),
                ('problem', models.CharField(blank=True, max_length=300)),
                ('busy_until', models.DateTimeField(help_text='Set while one task reconciles the pool.', null=True)),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('minimum__lte', models.F('maximum'))), name='capacity_minimum'), models.CheckConstraint(condition=models.Q(('gpus_per_node__gte', 1), ('node_nano_per_hour__gte', 0), models.Q(('budget_nano_per_hour', None), ('budget_nano_per_hour__gte', 0), _connector='OR')), name='capacity_amounts')],
            },
        ),
        migrations.CreateModel(
            name='CapacityNode',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='node', primary_key=True, separator='_', serialize=False)),
                ('status', models.CharField(choices=[(apps.finetuning.lifecycle.NodeStatus['DRAINING'], 'draining'), (apps.finetuning.lifecycle.NodeStatus['LOST'], 'lost'), (apps.finetuning.lifecycle.NodeStatus['RELEASED'], 'released'), (apps.finetuning.lifecycle.NodeStatus['REQUESTED'], 'requested'), (apps.finetuning.lifecycle.NodeStatus['RUNNING'], 'running'), (apps.finetuning.lifecycle.NodeStatus['STARTING'], 'starting')], default=apps.finetuning.lifecycle.NodeStatus['REQUESTED'], max_length=10)),
                ('external_id', models.CharField(blank=True, help_text='As the engine calls it.', max_length=64)),
                ('reason', models.CharField(blank=True, help_text='Why it waits, or why it ended.', max_length=300)),
                ('requested_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('ended_at', models.DateTimeField(null=True)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='nodes', to='finetuning.gpupool')),
                ('token', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='finetuning.workertoken')),
                ('worker', models.OneToOneField(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='node', to='finetuning.worker')),
            ],
            options={
                'indexes': [models.Index(fields=['pool', '-requested_at'], name='node_newest')],
                'constraints': [models.CheckConstraint(condition=models.Q(models.Q(('ended_at', None), ('status__in', [apps.finetuning.lifecycle.NodeStatus['DRAINING'], apps.finetuning.lifecycle.NodeStatus['REQUESTED'], apps.finetuning.lifecycle.NodeStatus['RUNNING'], apps.finetuning.lifecycle.NodeStatus['STARTING']])), models.Q(('ended_at__isnull', False), ('status__in', [apps.finetuning.lifecycle.NodeStatus['LOST'], apps.finetuning.lifecycle.NodeStatus['RELEASED']])), _connector='OR'), name='node_ended_iff_status')],
            },
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='capacitynode',
            trigger=pgtrigger.compiler.Trigger(name='node_moves', sql=pgtrigger.compiler.UpsertTriggerSql(declare='DECLARE _is_valid_transition BOOLEAN;', func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{draining:lost,draining:released,requested:released,requested:starting,running:draining,running:lost,running:released,starting:draining,starting:lost,starting:released,starting:running}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;', hash='7b27cd24b5ab5a41ae801c2ceb3b1a7873c8e7ae', operation='UPDATE', pgid='pgtrigger_node_moves_527d2', table='finetuning_capacitynode', when='BEFORE')),
        ),
    ]
