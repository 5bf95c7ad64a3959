"""Examinations of uploaded adapters, the answers of several workers to a rehearsal, and groups of machines."""

import apps.core.ids
import django.db.models.deletion
import django.db.models.expressions
import django.db.models.lookups
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0014_service_accounts'),
        ('adapters', '0004_missing_parts'),
        ('catalog', '0005_hub_lookups'),
        ('datasets', '0003_uploads_and_attempts'),
        ('finetuning', '0013_queue_shares'),
    ]

    operations = [
        migrations.RenameField("memoryrehearsal", "tries", "takes"),
        migrations.AlterField(
            model_name="memoryrehearsal",
            name="takes",
            field=models.PositiveSmallIntegerField(
                default=0, help_text="By workers, those that were interrupted included."
            ),
        ),
        migrations.AddField(
            model_name="memoryrehearsal",
            name="answers",
            field=models.JSONField(
                default=list, help_text="Not believed yet: worker, and memory or null."
            ),
        ),
        migrations.AlterField(
            model_name="memoryrehearsal",
            name="computed_bytes",
            field=models.BigIntegerField(help_text="Peak by the formula; a figure far from it is refused."),
        ),
        migrations.AlterField(
            model_name="memoryrehearsal",
            name="report",
            field=models.JSONField(help_text="Believed: apps.contracts.runs.MemoryReport", null=True),
        ),
        migrations.CreateModel(
            name='Examination',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='exam', primary_key=True, separator='_', serialize=False)),
                ('asked_at', models.DateTimeField()),
                ('taken_at', models.DateTimeField(null=True)),
                ('tries', models.PositiveSmallIntegerField(default=0)),
                ('ended_at', models.DateTimeField(null=True)),
                ('problem', models.CharField(blank=True, help_text='Why there are no numbers, once it has ended.', max_length=300)),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('version', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='adapters.adapterversion')),
                ('worker', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='finetuning.worker')),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('ended_at', None)), fields=['asked_at'], name='examination_open')],
            },
        ),
        migrations.CreateModel(
            name='RunMember',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=33, prefix='member', primary_key=True, separator='_', serialize=False)),
                ('rank', models.PositiveSmallIntegerField(help_text="From 1: the run's worker is 0.")),
                ('address', models.CharField(help_text='Where the others reach this machine.', max_length=253)),
                ('token_sha256', models.CharField(max_length=64, null=True, unique=True)),
                ('handed_at', models.DateTimeField(help_text='When a claim was last answered with this place.', null=True)),
                ('started_at', models.DateTimeField(help_text='Of its first heartbeat.', null=True)),
                ('heartbeat_at', models.DateTimeField(help_text='Of its last heartbeat; before the first one, of the lease.')),
                ('left_at', models.DateTimeField(help_text='When its part of the training was done.', null=True)),
            ],
        ),
        migrations.AddField(
            model_name='finetuningjob',
            name='node_count',
            field=models.PositiveSmallIntegerField(default=1, help_text='Machines that share these GPUs evenly.'),
        ),
        migrations.AddField(
            model_name='run',
            name='master',
            field=models.CharField(blank=True, help_text='Where its machines meet, as host:port; blank for one machine.', max_length=300),
        ),
        migrations.AddField(
            model_name='worker',
            name='offer',
            field=models.JSONField(help_text='apps.finetuning.usage.offers.Offer, of its last claim; null: it joins no group.', null=True),
        ),
        migrations.AlterField(
            model_name='finetuningjob',
            name='gpu_count',
            field=models.PositiveSmallIntegerField(default=1, help_text='GPUs that each attempt takes, of all machines.'),
        ),
        migrations.AddConstraint(
            model_name='finetuningjob',
            constraint=models.CheckConstraint(condition=models.Q(('node_count__gte', 1), django.db.models.lookups.Exact(django.db.models.expressions.CombinedExpression(models.F('gpu_count'), '%%', models.F('node_count')), models.Value(0))), name='job_nodes_share_gpus'),
        ),
        migrations.AddField(
            model_name='runmember',
            name='organization',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization'),
        ),
        migrations.AddField(
            model_name='runmember',
            name='run',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='members', to='finetuning.run'),
        ),
        migrations.AddField(
            model_name='runmember',
            name='worker',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='memberships', to='finetuning.worker'),
        ),
        migrations.AddConstraint(
            model_name='runmember',
            constraint=models.UniqueConstraint(fields=('run', 'rank'), name='member_rank_once'),
        ),
        migrations.AddConstraint(
            model_name='runmember',
            constraint=models.UniqueConstraint(fields=('run', 'worker'), name='member_worker_once'),
        ),
        migrations.AddConstraint(
            model_name='runmember',
            constraint=models.CheckConstraint(condition=models.Q(('rank__gte', 1)), name='member_rank'),
        ),
        migrations.AddConstraint(
            model_name='runmember',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('handed_at', None), ('started_at', None), ('token_sha256', None)), models.Q(('handed_at__isnull', False), ('token_sha256__isnull', False)), _connector='OR'), name='member_handed_pair'),
        ),
    ]
