"""Replicas, deployments, and where adapters are loaded."""

import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
        ('adapters', '0001_initial'),
        ('catalog', '0001_initial'),
        ('finetuning', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Replica',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='rep', primary_key=True, separator='_', serialize=False)),
                ('base_model', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='replicas', to='catalog.basemodel')),
                ('whole_model', models.ForeignKey(help_text='The version it serves merged, and nothing else; null: the base model and adapters.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='whole_replicas', to='adapters.adapterversion')),
                ('worker', models.OneToOneField(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='replica', to='finetuning.worker')),
                ('url', models.CharField(blank=True, help_text='Where its proxy listens: unix:///… or http(s)://…', max_length=300)),
                ('is_address_accepted', models.BooleanField(db_default=True, help_text='By the settings or an operator.')),
                ('capacity', models.PositiveIntegerField(default=56, help_text='Adapters registered at once.')),
                ('slots', models.PositiveIntegerField(default=8, help_text='Adapters in one batch without loss of speed.')),
                ('max_rank', models.PositiveIntegerField(default=64)),
                ('reported_room', models.JSONField(default=dict, help_text='capacity, slots, max_rank; {} before it was heard of')),
                ('revision', models.CharField(blank=True, help_text="SHA-256 of the base model's weights.", max_length=64)),
                ('load', models.JSONField(default=dict, help_text='apps.contracts.serving.EngineLoad, {} before it was heard of')),
                ('draining_at', models.DateTimeField(help_text='Gets nothing new and answers only what no other can.', null=True)),
                ('generation', models.BigIntegerField(default=0, help_text='Grows with each change of the desired set.')),
                ('engine_generation', models.CharField(blank=True, max_length=64)),
                ('is_ready', models.BooleanField(default=False)),
                ('reason', models.CharField(blank=True, max_length=300)),
                ('observed_at', models.DateTimeField(null=True)),
                ('isolated_at', models.DateTimeField(help_text='Found faulty: asked nothing until it is cleared.', null=True)),
                ('isolated_because', models.CharField(blank=True, db_default='', max_length=300)),
                ('fault_count', models.PositiveIntegerField(db_default=0, help_text='How often it was found faulty, ever.')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('region', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='replicas', to='accounts.region')),
                ('readiness_changed_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), help_text='Since when it is ready, or is not.')),
                ('retired_at', models.DateTimeField(help_text='Its machine was released: it never comes back.', null=True)),
            ],
        ),
        migrations.CreateModel(
            name='EngineTokens',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('replica', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='engine_tokens', to='serving.replica')),
                ('engine_generation', models.CharField(max_length=64)),
                ('day', models.DateField()),
                ('first_at', models.DateTimeField()),
                ('first_input_tokens', models.BigIntegerField()),
                ('first_output_tokens', models.BigIntegerField()),
                ('last_at', models.DateTimeField()),
                ('last_input_tokens', models.BigIntegerField()),
                ('last_output_tokens', models.BigIntegerField()),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('replica', 'engine_generation', 'day'), name='engine_tokens_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='MeteringCheck',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('replica', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='metering_checks', to='serving.replica')),
                ('day', models.DateField()),
                ('counted_input_tokens', models.BigIntegerField()),
                ('counted_output_tokens', models.BigIntegerField()),
                ('least_input_tokens', models.BigIntegerField()),
                ('most_input_tokens', models.BigIntegerField()),
                ('least_output_tokens', models.BigIntegerField()),
                ('most_output_tokens', models.BigIntegerField()),
                ('request_count', models.BigIntegerField()),
                ('difference_share', models.FloatField(help_text='Of what was counted, beyond what the readings leave open.')),
                ('is_within', models.BooleanField()),
                ('checked_at', models.DateTimeField()),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('replica', 'day'), name='metering_check_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Deployment',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='dep', primary_key=True, separator='_', serialize=False)),
                ('adapter_version', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='deployments', to='adapters.adapterversion')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('removed_at', models.DateTimeField(null=True)),
                ('last_requested_at', models.DateTimeField(help_text='To within seconds; decides which stay loaded.', null=True)),
                ('quick_demand', models.FloatField(default=0.0)),
                ('slow_demand', models.FloatField(default=0.0)),
                ('demand_at', models.DateTimeField(help_text='When both were right; they have faded since.', null=True)),
                ('pinned_at', models.DateTimeField(help_text='Kept warm, and paid for, since.', null=True)),
                ('warm_billed_until', models.DateTimeField(null=True)),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(condition=models.Q(('removed_at', None)), fields=('adapter_version',), name='deployment_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Alias',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='alias', primary_key=True, separator='_', serialize=False)),
                ('adapter', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='aliases', to='adapters.adapter')),
                ('name', models.CharField(help_text='Of an imported alias, the whole name.', max_length=240)),
                ('model_name', models.CharField(help_text='ft:<base>:<organization>:<suffix>:<name>', max_length=240)),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='adapters.adapterversion')),
                ('canary_version', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='adapters.adapterversion')),
                ('canary_percent', models.PositiveSmallIntegerField(default=0)),
                ('previous_version', models.ForeignKey(help_text='To return to.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='adapters.adapterversion')),
                ('moved_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('adapter', 'name'), name='alias_once'),
                    models.UniqueConstraint(fields=('organization', 'model_name'), name='alias_model_name_once'),
                    models.CheckConstraint(condition=models.Q(models.Q(('canary_percent', 0), ('canary_version', None)), models.Q(('canary_percent__gte', 1), ('canary_percent__lte', 99), ('canary_version__isnull', False)), _connector='OR'), name='alias_canary_share'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Placement',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('replica', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='placements', to='serving.replica')),
                ('adapter_version', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='placements', to='adapters.adapterversion')),
                ('placed_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('replica', 'adapter_version'), name='placement_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='LoadedAdapter',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('replica', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='loaded', to='serving.replica')),
                ('adapter_version', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='loaded', to='adapters.adapterversion')),
                ('state', models.CharField(max_length=12)),
                ('reason', models.CharField(blank=True, max_length=300)),
                ('observed_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('replica', 'adapter_version'), name='loaded_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='ReplicaToken',
            fields=[
                ('replica', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='token', serialize=False, to='serving.replica')),
                ('token_sealed', models.BinaryField()),
            ],
        ),
        migrations.CreateModel(
            name='ReplicaFleet',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='fleet', primary_key=True, separator='_', serialize=False)),
                ('minimum', models.PositiveSmallIntegerField(default=0)),
                ('maximum', models.PositiveSmallIntegerField(default=1)),
                ('requests_per_replica', models.PositiveSmallIntegerField(default=16, help_text='That one replica answers at once.')),
                ('idle_seconds', models.PositiveIntegerField(default=600, help_text='Without a need for so long, a replica stops.')),
                ('last_requested_at', models.DateTimeField(help_text='To within seconds.', null=True)),
                ('wanted', models.PositiveSmallIntegerField(default=0, help_text='By the last reconciliation.')),
                ('wanted_at', models.DateTimeField(help_text='When so many were last needed.', null=True)),
                ('able_at', models.DateTimeField(help_text='When a replica could last start: requests wait for it.', null=True)),
                ('base_model', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='fleets', to='catalog.basemodel')),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='fleets', to='finetuning.gpupool')),
                ('region', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='fleets', to='accounts.region')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('pool', 'base_model'), name='fleet_once'), models.CheckConstraint(condition=models.Q(('minimum__lte', models.F('maximum')), ('requests_per_replica__gte', 1)), name='fleet_limits')],
            },
        ),
    ]
