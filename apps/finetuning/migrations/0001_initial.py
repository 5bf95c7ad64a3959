"""Jobs, runs, pools, workers, rehearsals, calibrations from finished runs, conversions, and pushes to the hub."""

import apps.core.ids
import django.contrib.postgres.fields
import django.db.models.deletion
import django.db.models.expressions
import django.db.models.functions.datetime
import django.db.models.lookups
import pgtrigger.compiler
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models

COUNT_IN_SHARE = """
    IF added_queued = 0 AND added_held = 0 THEN
        RETURN NULL;
    END IF;
    SELECT gpu_count INTO gpus FROM finetuning_finetuningjob WHERE id = said.job_id;
    gpus := coalesce(gpus, 1);
    IF added_held < 0 AND said.leased_at IS NOT NULL THEN
        hours := greatest(extract(epoch FROM moment - said.leased_at)::float8, 0) / 3600;
    END IF;
    FOR attempt IN 1..2 LOOP
        UPDATE finetuning_queueshare SET
            queued = queued + added_queued,
            queued_since = CASE
                WHEN queued + added_queued = 0 THEN NULL WHEN queued = 0 THEN said.created_at ELSE queued_since
            END,
            held_gpus = held_gpus + added_held * gpus,
            used_gpu_hours = used_gpu_hours
                * exp(-least(greatest(extract(epoch FROM moment - used_at)::float8, 0) / 3600, 500))
                + gpus * (1 - exp(-least(hours, 500))),
            used_at = moment,
            served_at = CASE WHEN added_held > 0 THEN said.leased_at ELSE served_at END,
            served = served + greatest(added_held, 0)
        WHERE organization_id = said.organization_id AND pool_id = said.pool_id;
        EXIT WHEN FOUND;
        INSERT INTO finetuning_queueshare (organization_id, pool_id) VALUES (said.organization_id, said.pool_id)
            ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN NULL;
"""


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
        ('adapters', '0001_initial'),
        ('catalog', '0001_initial'),
        ('datasets', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Quota',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='quota', primary_key=True, separator='_', serialize=False)),
                ('concurrent_gpus', models.PositiveIntegerField(default=2, null=True)),
                ('queued_jobs', models.PositiveIntegerField(default=20, null=True)),
                ('gpu_seconds_per_month', models.PositiveBigIntegerField(default=360000, null=True)),
                ('storage_bytes', models.PositiveBigIntegerField(default=20000000000, null=True)),
                ('requests_per_minute', models.PositiveIntegerField(default=6000, null=True)),
                ('tokens_per_minute', models.PositiveIntegerField(default=2000000, null=True)),
                ('concurrent_requests', models.PositiveIntegerField(default=256, null=True)),
                ('weight', models.PositiveIntegerField(default=1, help_text='Share of a busy pool, relative to others.')),
                ('updated_by', models.CharField(max_length=64)),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization',), name='quota_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='quota_key_news',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='INSERT OR UPDATE',
                            table='finetuning_quota',
                            when='AFTER',
                            func="PERFORM pg_notify('anneal_keys', NEW.organization_id); RETURN NULL;",
                            hash='6bfe949839c12a10c92f50ad652d9563534f284e',
                            pgid='pgtrigger_quota_key_news_662cb',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='TrackerKey',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='trk', primary_key=True, separator='_', serialize=False)),
                ('kind', models.CharField(choices=[('wandb', 'Weights & Biases'), ('mlflow', 'MLflow')], max_length=8)),
                ('url', models.URLField(blank=True, help_text='Of an MLflow tracking server.', max_length=400)),
                ('secret_sealed', models.BinaryField(help_text='The key or token, encrypted.')),
                ('hint', models.CharField(help_text='The last characters, to tell keys apart.', max_length=8)),
                ('updated_by', models.CharField(max_length=64)),
                ('updated_at', models.DateTimeField()),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'kind'), name='tracker_one_of_a_kind'),
                ],
            },
        ),
        migrations.CreateModel(
            name='GpuPool',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='pool', primary_key=True, separator='_', serialize=False)),
                ('name', models.SlugField(help_text='Names the queue train.<name> and the price.', max_length=40, unique=True)),
                ('gpu_type', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.gputype')),
                ('region', models.ForeignKey(db_column='region', on_delete=django.db.models.deletion.PROTECT, related_name='pools', to='accounts.region')),
                ('memory_bytes', models.BigIntegerField(help_text='Usable by one job; a CPU pool has what the operator grants it.')),
                ('is_open', models.BooleanField(default=True, help_text='Accepts new jobs.')),
                ('serves_whole_models', models.BooleanField(default=False, help_text='A replica may be given to one merged or fully trained model.')),
                ('is_spot', models.BooleanField(default=False, help_text='Its machines may be taken away at any moment.')),
                ('interruptions_per_hour', models.FloatField(default=0.0, help_text='Expected of one machine; 0 unless spot.')),
                ('price_policy', models.CharField(choices=[('firm', 'Firm: the customer pays at most the quoted maximum'), ('metered', 'Metered: the customer pays for the time, up to the spend cap')], default='firm', max_length=8)),
                ('firm_factor', models.DecimalField(decimal_places=2, default=3, help_text='A run with a firm price pauses once its time costs this many times the quoted maximum.', max_digits=4)),
                ('calibration', models.ForeignKey(help_text='In use; null: none.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='finetuning.calibrationversion')),
                ('calibration_pinned_at', models.DateTimeField(help_text='Set: new versions wait for an operator.', null=True)),
                ('calibration_pinned_by', models.CharField(max_length=64, null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('borrows_from', models.ForeignKey(help_text='Its runs use free machines of that pool, and give them back when runs of that pool wait.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='borrowers', to='finetuning.gpupool')),
            ],
            options={
                'constraints': [
                    models.CheckConstraint(condition=models.Q(models.Q(('calibration_pinned_at', None), ('calibration_pinned_by', None)), models.Q(('calibration_pinned_at__isnull', False), ('calibration_pinned_by__isnull', False)), _connector='OR'), name='pool_calibration_pin_pair'),
                    models.CheckConstraint(condition=models.Q(models.Q(('interruptions_per_hour__gt', 0), ('is_spot', True)), models.Q(('interruptions_per_hour', 0), ('is_spot', False)), _connector='OR'), name='pool_interruptions_iff_spot'),
                    models.CheckConstraint(condition=models.Q(('firm_factor__gte', 1), ('firm_factor__lte', 10)), name='pool_firm_factor'),
                    models.CheckConstraint(condition=models.Q(('borrows_from', None), ('is_spot', True), _connector='OR'), name='pool_borrower_is_spot'),
                ],
            },
        ),
        migrations.CreateModel(
            name='WorkerToken',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='wtok', primary_key=True, separator='_', serialize=False)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='finetuning.gpupool')),
                ('kind', models.CharField(choices=[('trainer', 'Trainer: takes fine-tuning runs'), ('replica', 'Replica: serves one model')], max_length=8)),
                ('base_model', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.basemodel')),
                ('whole_model', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='adapters.adapterversion')),
                ('token_sha256', models.CharField(max_length=64, unique=True)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('expires_at', models.DateTimeField()),
                ('used_at', models.DateTimeField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name='Worker',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=33, prefix='worker', primary_key=True, separator='_', serialize=False)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='workers', to='finetuning.gpupool')),
                ('kind', models.CharField(choices=[('trainer', 'Trainer: takes fine-tuning runs'), ('replica', 'Replica: serves one model')], default='trainer', max_length=8)),
                ('hostname', models.CharField(max_length=120)),
                ('credential_sha256', models.CharField(max_length=64, unique=True)),
                ('gpus', models.JSONField(default=list)),
                ('software', models.JSONField(default=dict)),
                ('memory_bytes', models.BigIntegerField(help_text='Of the machine itself; null: it has not said.', null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('last_seen_at', models.DateTimeField(null=True)),
                ('cordoned_at', models.DateTimeField(null=True)),
                ('drain_requested_at', models.DateTimeField(null=True)),
                ('revoked_at', models.DateTimeField(null=True)),
                ('offer', models.JSONField(help_text='apps.finetuning.usage.offers.Offer, of its last claim; null: it joins no group.', null=True)),
                ('measuring', models.ForeignKey(help_text='It got its hub token.', null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='catalog.basemodel')),
                ('measuring_since', models.DateTimeField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name='ThroughputProbe',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='probe', primary_key=True, separator='_', serialize=False)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='probes', to='finetuning.gpupool')),
                ('worker', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='finetuning.worker')),
                ('base_model', models.ForeignKey(help_text='Null: made-up weights.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.basemodel')),
                ('shape', models.CharField(blank=True, help_text='Of made-up weights, as the grid calls it.', max_length=60)),
                ('method', models.CharField(max_length=16)),
                ('report', models.JSONField(help_text='apps.contracts.worker_api.ProbeReport')),
                ('measured_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(fields=['pool', 'base_model', 'method', '-measured_at'], name='probe_newest'),
                ],
            },
        ),
        migrations.CreateModel(
            name='FineTuningJob',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='ftjob', primary_key=True, separator='-', serialize=False)),
                ('status', models.CharField(choices=[('cancelled', 'cancelled'), ('failed', 'failed'), ('paused', 'paused'), ('pausing', 'pausing'), ('queued', 'queued'), ('running', 'running'), ('succeeded', 'succeeded'), ('validating_files', 'validating files')], default='validating_files', max_length=16)),
                ('base_model', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.basemodel')),
                ('training_file', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='jobs', to='datasets.datasetversion')),
                ('validation_file', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='validating_jobs', to='datasets.datasetversion')),
                ('pool', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='jobs', to='finetuning.gpupool')),
                ('gpu_count', models.PositiveSmallIntegerField(default=1, help_text='GPUs that each attempt takes, of all machines.')),
                ('node_count', models.PositiveSmallIntegerField(default=1, help_text='Machines that share these GPUs evenly.')),
                ('suffix', models.CharField(blank=True, max_length=64)),
                ('method', models.CharField(max_length=16)),
                ('hyperparameters', models.JSONField(help_text='apps.contracts.hyperparameters.Hyperparameters, every field resolved')),
                ('requested', models.JSONField(default=dict, help_text='The request as sent, for the API to echo.')),
                ('metadata', models.JSONField(default=dict)),
                ('seed', models.BigIntegerField()),
                ('estimate', models.JSONField(default=dict, help_text='apps.estimates.quote.Estimate at the moment of launch')),
                ('price_rule', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.pricerule')),
                ('spend_cap_nano', models.BigIntegerField(default=0)),
                ('firm_max_nano', models.BigIntegerField(help_text='The quoted maximum, if the price was firm at launch; no cap is above it.', null=True)),
                ('firm_limit_nano', models.BigIntegerField(help_text='What the time of a run may cost before a job with a firm price pauses.', null=True)),
                ('overran_at', models.DateTimeField(help_text='When it reached that limit; an operator continues it.', null=True)),
                ('hold_id', models.CharField(blank=True, max_length=40)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('queued_at', models.DateTimeField(null=True)),
                ('started_at', models.DateTimeField(null=True)),
                ('finished_at', models.DateTimeField(null=True)),
                ('dismissed_at', models.DateTimeField(help_text='When its failure was dismissed from the overview.', null=True)),
                ('cancel_requested_at', models.DateTimeField(null=True)),
                ('cancel_requested_by', models.CharField(max_length=64, null=True)),
                ('pause_requested_at', models.DateTimeField(null=True)),
                ('pause_requested_by', models.CharField(max_length=64, null=True)),
                ('last_event_sequence', models.BigIntegerField(default=0)),
                ('step', models.PositiveIntegerField(default=0)),
                ('total_steps', models.PositiveIntegerField(null=True)),
                ('trained_tokens', models.BigIntegerField(default=0)),
                ('billed_gpu_ms', models.BigIntegerField(default=0)),
                ('cost_nano', models.BigIntegerField(default=0)),
                ('error_code', models.CharField(blank=True, max_length=48)),
                ('error_message', models.CharField(blank=True, max_length=500)),
                ('error_param', models.CharField(blank=True, max_length=64)),
                ('adapter_version', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='adapters.adapterversion')),
                ('idempotency_key', models.CharField(max_length=200, null=True)),
                ('member_id', models.CharField(blank=True, help_text='The member behind it, whose allowance counts.', max_length=40)),
                ('labels', models.JSONField(default=dict, help_text='Its metadata, and the labels of the key that created it.')),
                ('moved_gpu_ms', models.BigIntegerField(default=0, help_text='Of these, those billed before its last move.')),
                ('moved_nano', models.BigIntegerField(default=0, help_text='What these cost, at the prices of the pools before.')),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project')),
                ('checked_at', models.DateTimeField(help_text='When it was last looked at while it waited for its files.', null=True)),
                ('traceparent', models.CharField(blank=True, db_default='', help_text='The trace of its creation.', max_length=55)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', '-created_at', '-id'], include=('suffix', 'training_file', 'base_model'), name='job_newest'),
                    models.Index(fields=['pool', 'status'], name='job_pool_status'),
                    models.Index(fields=['-created_at', '-id'], name='job_newest_of_all'),
                    models.Index(condition=models.Q(('status__in', ('validating_files', 'queued', 'running', 'pausing', 'paused'))), fields=['status', 'created_at', 'id', 'organization'], name='job_open'),
                    models.Index(condition=models.Q(('finished_at__isnull', False)), fields=['-finished_at', 'organization'], name='job_ended'),
                    models.Index(fields=['organization', '-cost_nano', '-id'], name='job_dearest'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('queued_at', None), models.Q(('pool__isnull', False), ('price_rule__isnull', False), ('spend_cap_nano__gt', 0), models.Q(('hold_id', ''), _negated=True)), _connector='OR'), name='job_admitted_whole'),
                    models.CheckConstraint(condition=models.Q(('gpu_count__gte', 1)), name='job_takes_a_gpu'),
                    models.CheckConstraint(condition=models.Q(('node_count__gte', 1), django.db.models.lookups.Exact(django.db.models.expressions.CombinedExpression(models.F('gpu_count'), '%%', models.F('node_count')), models.Value(0))), name='job_nodes_share_gpus'),
                    models.CheckConstraint(condition=models.Q(models.Q(('cancel_requested_at', None), ('cancel_requested_by', None)), models.Q(('cancel_requested_at__isnull', False), ('cancel_requested_by__isnull', False)), _connector='OR'), name='job_cancel_pair'),
                    models.CheckConstraint(condition=models.Q(models.Q(('pause_requested_at', None), ('pause_requested_by', None)), models.Q(('pause_requested_at__isnull', False), ('pause_requested_by__isnull', False)), _connector='OR'), name='job_pause_pair'),
                    models.CheckConstraint(condition=models.Q(models.Q(('finished_at__isnull', False), ('status__in', ['cancelled', 'failed', 'succeeded'])), models.Q(models.Q(('status__in', ['cancelled', 'failed', 'succeeded']), _negated=True), ('finished_at', None)), _connector='OR'), name='job_finished_iff_terminal'),
                    models.CheckConstraint(condition=models.Q(('cost_nano__lte', models.F('spend_cap_nano'))), name='job_cost_within_cap'),
                    models.CheckConstraint(condition=models.Q(models.Q(('firm_limit_nano', None), ('firm_max_nano', None), ('overran_at', None)), models.Q(('firm_limit_nano__gte', models.F('firm_max_nano')), ('firm_limit_nano__isnull', False), ('firm_max_nano__gte', models.F('spend_cap_nano')), ('firm_max_nano__isnull', False)), _connector='OR'), name='job_cap_within_firm_max'),
                    models.UniqueConstraint(condition=models.Q(('idempotency_key__isnull', False)), fields=('organization', 'idempotency_key'), name='job_idempotent'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='job_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='finetuning_finetuningjob',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{paused:cancelled,paused:failed,paused:queued,pausing:cancelled,pausing:failed,pausing:paused,pausing:running,pausing:succeeded,queued:cancelled,queued:failed,queued:running,running:cancelled,running:failed,running:pausing,running:queued,running:succeeded,validating_files:cancelled,validating_files:failed,validating_files:queued}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='43de9e387958cdca2a50021ba2bddd6ecceb9c6d',
                            pgid='pgtrigger_job_status_75b96',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='JobEvent',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', models.CharField(help_text='ftevent-<ulid of the job>-<sequence>', max_length=48, primary_key=True, serialize=False)),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='events', to='finetuning.finetuningjob')),
                ('sequence', models.BigIntegerField()),
                ('level', models.CharField(default='info', max_length=8)),
                ('type', models.CharField(default='message', help_text='message | metrics | state | log | samples', max_length=16)),
                ('message', models.CharField(max_length=1000)),
                ('data', models.JSONField(default=dict)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('type', 'metrics'), _negated=True), fields=['job', 'sequence'], name='job_event_words'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('job', 'sequence'), name='job_event_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='job_event_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE',
                            table='finetuning_jobevent',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update rows from % table', TG_TABLE_NAME;",
                            hash='e1ff0e6ee295bd399c5b129348204911c697a059',
                            pgid='pgtrigger_job_event_append_only_aa76b',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='CalibrationVersion',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='cal', primary_key=True, separator='_', serialize=False)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='calibrations', to='finetuning.gpupool')),
                ('number', models.PositiveIntegerField(help_text="Counts a pool's versions from 1.")),
                ('calibration', models.JSONField(help_text='apps.estimates.calibration.Calibration')),
                ('fitted_on', models.JSONField(help_text='apps.finetuning.pools.calibrations.FittedOn')),
                ('last_point', models.BigIntegerField(help_text='The newest CalibrationPoint that was there.')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('pool', 'number'), name='calibration_number_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='calibration_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='finetuning_calibrationversion',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='a0f2e3220cf63829e117eee919da501138b2adca',
                            pgid='pgtrigger_calibration_append_only_5f9a0',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='PoolAccuracy',
            fields=[
                ('pool', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='accuracy', serialize=False, to='finetuning.gpupool')),
                ('report', models.JSONField(help_text='apps.finetuning.pools.accuracy.AccuracyReport')),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
        ),
        migrations.CreateModel(
            name='Run',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='run', primary_key=True, separator='_', serialize=False)),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='runs', to='finetuning.finetuningjob')),
                ('attempt', models.PositiveIntegerField()),
                ('status', models.CharField(choices=[('cancelled', 'cancelled'), ('failed', 'failed'), ('leased', 'leased'), ('lost', 'lost'), ('paused', 'paused'), ('queued', 'queued'), ('running', 'running'), ('succeeded', 'succeeded')], default='queued', max_length=16)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='runs', to='finetuning.gpupool')),
                ('phase', models.CharField(blank=True, max_length=16)),
                ('lease_id', models.CharField(max_length=40, null=True, unique=True)),
                ('lease_token_sha256', models.CharField(max_length=64, null=True)),
                ('lease_expires_at', models.DateTimeField(null=True)),
                ('heartbeat_at', models.DateTimeField(null=True)),
                ('worker', models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='runs', to='finetuning.worker')),
                ('master', models.CharField(blank=True, help_text='Where its machines meet, as host:port; blank for one machine.', max_length=300)),
                ('retry_at', models.DateTimeField(help_text='No claim takes it before: a limit of the month held it back, or its group did not come together.', null=True)),
                ('resume_from', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='finetuning.checkpoint')),
                ('last_sequence', models.BigIntegerField(default=0, help_text='Highest worker event sequence taken in.')),
                ('work', models.BigIntegerField(default=0, help_text='Units of work, as its worker counts them: without any for long, it is stalled.')),
                ('idle_ms', models.BigIntegerField(default=0, help_text='Time between heartbeats since the last work.')),
                ('stepless_ms', models.BigIntegerField(default=0, help_text='Time between heartbeats since the last new step.')),
                ('training_started_at', models.DateTimeField(null=True)),
                ('durable_step', models.PositiveIntegerField(default=0)),
                ('billed_gpu_ms', models.BigIntegerField(default=0, help_text='Time whose steps are durable, of all its GPUs.')),
                ('peak_memory_bytes', models.BigIntegerField(null=True)),
                ('failure_code', models.CharField(blank=True, max_length=48)),
                ('failure_message', models.CharField(blank=True, max_length=500)),
                ('log_tail', models.TextField(blank=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('leased_at', models.DateTimeField(null=True)),
                ('finished_at', models.DateTimeField(null=True)),
                ('return_requested_at', models.DateTimeField(help_text='The pool that lent the machine wants it back.', null=True)),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('status', 'queued')), fields=['pool', 'organization', 'created_at', 'id'], name='run_queue'),
                    models.Index(fields=['organization', 'finished_at'], name='run_ended'),
                    models.Index(condition=models.Q(('training_started_at', None), _negated=True), fields=['pool', 'finished_at'], name='run_trained'),
                    models.Index(fields=['finished_at'], name='run_ended_of_all'),
                    models.Index(fields=['worker', '-leased_at', '-id'], name='run_of_worker'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('job', 'attempt'), name='run_attempt_once'),
                    models.UniqueConstraint(condition=models.Q(('status__in', ('queued', 'leased', 'running'))), fields=('job',), name='run_one_active'),
                    models.CheckConstraint(condition=models.Q(models.Q(('heartbeat_at__isnull', False), ('lease_expires_at__isnull', False), ('lease_id__isnull', False), ('lease_token_sha256__isnull', False), ('status__in', ('leased', 'running')), ('worker__isnull', False)), models.Q(models.Q(('status__in', ('leased', 'running')), _negated=True), ('lease_expires_at', None), ('lease_id', None), ('lease_token_sha256', None)), _connector='OR'), name='run_lease_iff_held'),
                    models.CheckConstraint(condition=models.Q(models.Q(('finished_at__isnull', False), ('status__in', ['cancelled', 'failed', 'lost', 'paused', 'succeeded'])), models.Q(models.Q(('status__in', ['cancelled', 'failed', 'lost', 'paused', 'succeeded']), _negated=True), ('finished_at', None)), _connector='OR'), name='run_finished_iff_terminal'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='run_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='finetuning_run',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{leased:cancelled,leased:failed,leased:lost,leased:paused,leased:running,queued:cancelled,queued:leased,running:cancelled,running:failed,running:lost,running:paused,running:succeeded}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='1416316f2c8ec2252128415ea4ed40fe124dc8ac',
                            pgid='pgtrigger_run_status_e16b1',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='run_share',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare="DECLARE said finetuning_run := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END; added_queued integer := coalesce((NEW.status IN ('queued'))::int, 0) - coalesce((OLD.status IN ('queued'))::int, 0); added_held integer := coalesce((NEW.status IN ('leased', 'running'))::int, 0) - coalesce((OLD.status IN ('leased', 'running'))::int, 0); moment timestamptz := clock_timestamp(); gpus integer; hours double precision := 0;",
                            operation='INSERT OR UPDATE OF "status" OR DELETE',
                            table='finetuning_run',
                            when='AFTER',
                            func=COUNT_IN_SHARE,
                            hash='2f59d0b5c08b3d0c6099a17dee1d7014ede219d7',
                            pgid='pgtrigger_run_share_ac7e3',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='run_time',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='INSERT OR UPDATE OF "leased_at", "finished_at", "billed_gpu_ms" OR DELETE',
                            table='finetuning_run',
                            when='AFTER',
                            func="\n    IF OLD.finished_at IS NOT NULL OR NEW.finished_at IS NOT NULL THEN\n        INSERT INTO finetuning_gpuday AS before (organization_id, pool_id, day, held_gpu_us, billed_gpu_ms)\n    SELECT ended.organization_id, ended.pool_id, midnight::date,\n        sum(ended.sign * 1000000::numeric * coalesce(job.gpu_count, 1) * extract(epoch FROM\n            least(span.until, midnight + interval '1 day') - greatest(span.since, midnight))),\n        sum(CASE WHEN midnight = date_trunc('day', span.until) THEN ended.sign * ended.billed_gpu_ms ELSE 0 END)\n    FROM (VALUES (-1, OLD.organization_id, OLD.pool_id, OLD.job_id, OLD.leased_at, OLD.finished_at, OLD.billed_gpu_ms), (1, NEW.organization_id, NEW.pool_id, NEW.job_id, NEW.leased_at, NEW.finished_at, NEW.billed_gpu_ms)) AS ended(sign, organization_id, pool_id, job_id, leased_at, finished_at, billed_gpu_ms)\n    LEFT JOIN finetuning_finetuningjob job ON job.id = ended.job_id\n    CROSS JOIN LATERAL (SELECT least(ended.leased_at, ended.finished_at) AT TIME ZONE 'UTC',\n        ended.finished_at AT TIME ZONE 'UTC') AS span(since, until)\n    CROSS JOIN LATERAL generate_series(date_trunc('day', span.since), span.until, interval '1 day') AS midnight\n    WHERE ended.finished_at IS NOT NULL\n    GROUP BY 1, 2, 3 ORDER BY 1, 2, 3\n    ON CONFLICT (organization_id, day, pool_id) DO UPDATE SET\n        held_gpu_us = before.held_gpu_us + excluded.held_gpu_us,\n        billed_gpu_ms = before.billed_gpu_ms + excluded.billed_gpu_ms;\n    END IF;\n    RETURN NULL;\n",
                            hash='7609ce122d57455a8e1e31805115ccbd4033fbe4',
                            pgid='pgtrigger_run_time_2c0ff',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='RunUpload',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=29, prefix='up', primary_key=True, separator='_', serialize=False)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='uploads', to='finetuning.run')),
                ('kind', models.CharField(max_length=12)),
                ('manifest', models.JSONField()),
                ('manifest_sha256', models.CharField(max_length=64)),
                ('object_prefix', models.CharField(max_length=300)),
                ('verified_at', models.DateTimeField(help_text='When every file had the promised hash; those of a checkpoint, the size.', null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'db_table': 'finetuning_upload',
                'constraints': [
                    models.UniqueConstraint(fields=('run', 'manifest_sha256'), name='upload_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Checkpoint',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=33, prefix='ftckpt', primary_key=True, separator='_', serialize=False)),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='checkpoints', to='finetuning.finetuningjob')),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='checkpoints', to='finetuning.run')),
                ('upload', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='finetuning.runupload')),
                ('step', models.PositiveIntegerField()),
                ('metrics', models.JSONField(default=dict)),
                ('bytes', models.BigIntegerField()),
                ('billed_gpu_ms', models.BigIntegerField(default=0, help_text="The run's time up to this step.")),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('quarantined_at', models.DateTimeField(null=True)),
                ('deleted_at', models.DateTimeField(null=True)),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('deleted_at', None)), fields=['organization'], include=['bytes'], name='checkpoint_kept'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('run', 'step'), name='checkpoint_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='CalibrationPoint',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('run', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='calibration', to='finetuning.run')),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='finetuning.gpupool')),
                ('outcome', models.CharField(choices=[('succeeded', 'Succeeded'), ('out_of_memory', 'Out of memory')], max_length=16)),
                ('family', models.CharField(help_text="model_type of the base model's config.json", max_length=48)),
                ('method', models.CharField(max_length=16)),
                ('attempts', models.PositiveIntegerField(help_text='Of the job; times, tokens and cost are sums over them.')),
                ('physics', models.CharField(help_text='apps.estimates.calibration.PHYSICS of the estimate', max_length=16)),
                ('version', models.PositiveIntegerField(default=0, help_text='Calibration of the pool in the estimate; 0: none.')),
                ('time_factor', models.FloatField(default=1.0)),
                ('memory_factor', models.FloatField(default=1.0)),
                ('estimated_seconds', models.FloatField(help_text='Training time alone, as billed.', null=True)),
                ('estimated_seconds_p10', models.FloatField(null=True)),
                ('estimated_seconds_p90', models.FloatField(null=True)),
                ('actual_seconds', models.FloatField(null=True)),
                ('wall_seconds', models.FloatField(help_text='From the first claim to the end, with everything unbilled.', null=True)),
                ('estimated_tokens_per_second', models.FloatField(null=True)),
                ('actual_tokens_per_second', models.FloatField(null=True)),
                ('estimated_peak_bytes', models.BigIntegerField(null=True)),
                ('estimated_peak_bytes_p10', models.BigIntegerField(null=True)),
                ('estimated_peak_bytes_p90', models.BigIntegerField(null=True)),
                ('actual_peak_bytes', models.BigIntegerField(help_text='Reserved by torch on a GPU, resident on a CPU.', null=True)),
                ('estimated_cost_nano', models.BigIntegerField(null=True)),
                ('estimated_cost_nano_p10', models.BigIntegerField(null=True)),
                ('estimated_cost_nano_p90', models.BigIntegerField(null=True)),
                ('actual_cost_nano', models.BigIntegerField(null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('beside_factor', models.FloatField(db_default=1.0, default=1.0)),
                ('estimated_beside_seconds', models.FloatField(help_text='Of the run, from claim to end, beside training.', null=True)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['pool', '-id'], name='calibration_point_newest'),
                ],
            },
        ),
        migrations.CreateModel(
            name='MemoryRehearsal',
            fields=[
                ('digest', models.CharField(help_text='SHA-256 of the request and its version.', max_length=64, primary_key=True, serialize=False)),
                ('request', models.JSONField(help_text='apps.contracts.runs.MemoryRequest')),
                ('computed_bytes', models.BigIntegerField(help_text='Peak by the formula; a figure far from it is refused.')),
                ('asker_sha256', models.CharField(help_text="Of the organization's id, to count its open requests.", max_length=64)),
                ('asked_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('worker', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='finetuning.worker')),
                ('taken_at', models.DateTimeField(null=True)),
                ('takes', models.PositiveSmallIntegerField(default=0, help_text='By workers, those that were interrupted included.')),
                ('answers', models.JSONField(default=list, help_text='Not believed yet: worker, and memory or null.')),
                ('report', models.JSONField(help_text='Believed: apps.contracts.runs.MemoryReport', null=True)),
                ('reported_at', models.DateTimeField(null=True)),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('reported_at', None)), fields=['asked_at'], name='rehearsal_open'),
                    models.Index(fields=['-asked_at'], name='rehearsal_newest'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(models.Q(('report', None), ('reported_at', None)), models.Q(('report__isnull', False), ('reported_at__isnull', False)), _connector='OR'), name='rehearsal_report_pair'),
                ],
            },
        ),
        migrations.CreateModel(
            name='PoolCapacity',
            fields=[
                ('pool', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='capacity', serialize=False, to='finetuning.gpupool')),
                ('kind', models.CharField(choices=[('static', 'You: machines join by hand'), ('slurm', 'Slurm: Anneal submits and cancels jobs'), ('kubernetes', 'Kubernetes: Anneal creates and deletes Jobs'), ('dstack', 'dstack: Anneal starts and stops runs')], default='static', max_length=10)),
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
                ('on_demand_nodes', models.PositiveSmallIntegerField(help_text='Further nodes are spot. Null: all nodes are alike, as the settings say.', null=True)),
                ('replaces_spot', models.BooleanField(default=True, help_text='On-demand nodes start where no spot node does.')),
                ('spot_node_nano_per_hour', models.BigIntegerField(default=0, help_text='What one spot node costs the operator.')),
                ('spot_retry_at', models.DateTimeField(help_text='On-demand nodes take the place of spot nodes before.', null=True)),
            ],
            options={
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('minimum__lte', models.F('maximum'))), name='capacity_minimum'),
                    models.CheckConstraint(condition=models.Q(('gpus_per_node__gte', 1), ('node_nano_per_hour__gte', 0), ('spot_node_nano_per_hour__gte', 0), models.Q(('budget_nano_per_hour', None), ('budget_nano_per_hour__gte', 0), _connector='OR')), name='capacity_amounts'),
                ],
            },
        ),
        migrations.CreateModel(
            name='CapacityNode',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='node', primary_key=True, separator='_', serialize=False)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='nodes', to='finetuning.gpupool')),
                ('status', models.CharField(choices=[('draining', 'draining'), ('lost', 'lost'), ('released', 'released'), ('requested', 'requested'), ('running', 'running'), ('starting', 'starting')], default='requested', max_length=10)),
                ('external_id', models.CharField(blank=True, help_text='As the engine calls it.', max_length=64)),
                ('reason', models.CharField(blank=True, help_text='Why it waits, or why it ended.', max_length=300)),
                ('token', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='finetuning.workertoken')),
                ('worker', models.OneToOneField(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='node', to='finetuning.worker')),
                ('requested_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('ended_at', models.DateTimeField(null=True)),
                ('is_spot', models.BooleanField(default=False, help_text='In a pool with nodes of both kinds.')),
            ],
            options={
                'indexes': [
                    models.Index(fields=['pool', '-requested_at'], name='node_newest'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(models.Q(('ended_at', None), ('status__in', ['draining', 'requested', 'running', 'starting'])), models.Q(('ended_at__isnull', False), ('status__in', ['lost', 'released'])), _connector='OR'), name='node_ended_iff_status'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='node_moves',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='finetuning_capacitynode',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{draining:lost,draining:released,requested:released,requested:starting,running:draining,running:lost,running:released,starting:draining,starting:lost,starting:released,starting:running}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='7b27cd24b5ab5a41ae801c2ceb3b1a7873c8e7ae',
                            pgid='pgtrigger_node_moves_527d2',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='QueueShare',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='finetuning.gpupool')),
                ('queued', models.IntegerField(db_default=0)),
                ('queued_since', models.DateTimeField(help_text='When the oldest run came since none was queued.', null=True)),
                ('held_gpus', models.IntegerField(db_default=0)),
                ('used_gpu_hours', models.FloatField(db_default=0.0, help_text='Of ended attempts; after each hour 1/e of it is left.')),
                ('used_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), help_text='When used_gpu_hours had its value.')),
                ('served_at', models.DateTimeField(help_text='When a worker last took one of its runs.', null=True)),
                ('served', models.BigIntegerField(db_default=0, help_text='How often workers took its runs.')),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('queued__gt', 0)), fields=['pool'], name='queue_share_waiting'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('pool', 'organization'), name='queue_share_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Examination',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='exam', primary_key=True, separator='_', serialize=False)),
                ('version', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='adapters.adapterversion')),
                ('asked_at', models.DateTimeField()),
                ('worker', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='finetuning.worker')),
                ('taken_at', models.DateTimeField(null=True)),
                ('tries', models.PositiveSmallIntegerField(default=0)),
                ('ended_at', models.DateTimeField(null=True)),
                ('problem', models.CharField(blank=True, help_text='Why there are no numbers, once it has ended.', max_length=300)),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('ended_at', None)), fields=['asked_at'], name='examination_open'),
                ],
            },
        ),
        migrations.CreateModel(
            name='RunMember',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=33, prefix='member', primary_key=True, separator='_', serialize=False)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='members', to='finetuning.run')),
                ('rank', models.PositiveSmallIntegerField(help_text="From 1: the run's worker is 0.")),
                ('worker', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='memberships', to='finetuning.worker')),
                ('address', models.CharField(help_text='Where the others reach this machine.', max_length=253)),
                ('token_sha256', models.CharField(max_length=64, null=True, unique=True)),
                ('handed_at', models.DateTimeField(help_text='When a claim was last answered with this place.', null=True)),
                ('started_at', models.DateTimeField(help_text='Of its first heartbeat.', null=True)),
                ('heartbeat_at', models.DateTimeField(help_text='Of its last heartbeat; before the first one, of the lease.')),
                ('left_at', models.DateTimeField(help_text='When its part of the training was done.', null=True)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['worker', '-id'], name='member_of_worker'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('run', 'rank'), name='member_rank_once'),
                    models.UniqueConstraint(fields=('run', 'worker'), name='member_worker_once'),
                    models.CheckConstraint(condition=models.Q(('rank__gte', 1)), name='member_rank'),
                    models.CheckConstraint(condition=models.Q(models.Q(('handed_at', None), ('started_at', None), ('token_sha256', None)), models.Q(('handed_at__isnull', False), ('token_sha256__isnull', False)), _connector='OR'), name='member_handed_pair'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Conversion',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='conv', primary_key=True, separator='_', serialize=False)),
                ('kind', models.CharField(help_text='The export: merged_16bit or gguf.', max_length=16)),
                ('status', models.CharField(choices=[('cancelled', 'cancelled'), ('failed', 'failed'), ('running', 'running'), ('succeeded', 'succeeded'), ('waiting', 'waiting')], default='waiting', max_length=10)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
                ('bytes', models.BigIntegerField(help_text='As quoted; once it has succeeded, what was made.')),
                ('price_nano', models.BigIntegerField(help_text='The confirmed price. It is held, and never exceeded.')),
                ('hold_id', models.CharField(blank=True, max_length=40)),
                ('cost_nano', models.BigIntegerField(default=0)),
                ('leased_at', models.DateTimeField(help_text='When a worker last took it.', null=True)),
                ('heartbeat_at', models.DateTimeField(null=True)),
                ('attempt', models.PositiveIntegerField(default=0)),
                ('failures', models.PositiveSmallIntegerField(default=0, help_text='Of attempts; an interruption by a run is none.')),
                ('object_prefix', models.CharField(blank=True, help_text="Of the attempt's files.", max_length=300)),
                ('manifest', models.JSONField(default=dict)),
                ('manifest_sha256', models.CharField(blank=True, max_length=64)),
                ('verified_at', models.DateTimeField(help_text='When the stored files were hashed.', null=True)),
                ('ended_at', models.DateTimeField(null=True)),
                ('problem', models.CharField(blank=True, help_text='Why the last attempt made nothing.', max_length=300)),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('price_rule', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.pricerule')),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='adapters.adapterversion')),
                ('worker', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='finetuning.worker')),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('status__in', ('waiting', 'running'))), fields=['created_at'], name='conversion_open'),
                ],
                'constraints': [
                    models.UniqueConstraint(condition=models.Q(('status__in', ('failed', 'cancelled')), _negated=True), fields=('version', 'kind'), name='conversion_once'),
                    models.CheckConstraint(condition=models.Q(('bytes__gte', 0), ('cost_nano__gte', 0), ('price_nano__gte', 0)), name='conversion_amounts'),
                    models.CheckConstraint(condition=models.Q(('price_nano', 0), models.Q(('hold_id', ''), _negated=True), _connector='OR'), name='conversion_priced'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='conversion_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='finetuning_conversion',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{running:failed,running:succeeded,running:waiting,waiting:cancelled,waiting:failed,waiting:running}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='ce71c999b6cb69f2c7bcd285a644558484fac593',
                            pgid='pgtrigger_conversion_status_28dab',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='HubPush',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='push', primary_key=True, separator='_', serialize=False)),
                ('export', models.CharField(blank=True, help_text="Blank: the adapter's own files.", max_length=16)),
                ('repository', models.CharField(help_text='owner/name', max_length=200)),
                ('status', models.CharField(choices=[('cancelled', 'cancelled'), ('failed', 'failed'), ('running', 'running'), ('succeeded', 'succeeded'), ('waiting', 'waiting')], default='waiting', max_length=10)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
                ('attempts', models.PositiveSmallIntegerField(default=0)),
                ('ended_at', models.DateTimeField(null=True)),
                ('commit', models.CharField(blank=True, max_length=64)),
                ('problem', models.CharField(blank=True, help_text='Why the last attempt failed.', max_length=300)),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='adapters.adapterversion')),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('ended_at', None)), fields=['created_at'], name='push_open'),
                ],
                'constraints': [
                    models.UniqueConstraint(condition=models.Q(('status__in', ('waiting', 'running'))), fields=('version', 'export', 'repository'), name='push_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='push_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='finetuning_hubpush',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{running:failed,running:succeeded,running:waiting,waiting:cancelled,waiting:failed,waiting:running}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='35859472ace115a6ef9b6080ddbec32cf2cb601f',
                            pgid='pgtrigger_push_status_f64df',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='HubPushToken',
            fields=[
                ('push', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='+', serialize=False, to='finetuning.hubpush')),
                ('token_sealed', models.BinaryField()),
            ],
        ),
        migrations.CreateModel(
            name='CapacityToken',
            fields=[
                ('capacity', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='+', serialize=False, to='finetuning.poolcapacity')),
                ('token_sealed', models.BinaryField()),
            ],
        ),
        migrations.CreateModel(
            name='GpuDay',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('day', models.DateField()),
                ('held_gpu_us', models.BigIntegerField(help_text='Microseconds of that day, of all GPUs.')),
                ('billed_gpu_ms', models.BigIntegerField(help_text='Of the attempts that ended on that day.')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('pool', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='+', to='finetuning.gpupool')),
            ],
            options={
                'indexes': [
                    models.Index(fields=['day'], name='gpu_day_of_all'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'day', 'pool'), name='gpu_day_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Allowance',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='allow', primary_key=True, separator='_', serialize=False)),
                ('member_id', models.CharField(help_text='The member whose jobs and keys it covers.', max_length=40, null=True)),
                ('label', models.JSONField(help_text='The label whose jobs and keys it covers: one name and its value.', null=True)),
                ('concurrent_gpus', models.PositiveIntegerField(null=True)),
                ('queued_jobs', models.PositiveIntegerField(null=True)),
                ('gpu_seconds_per_month', models.PositiveBigIntegerField(null=True)),
                ('storage_bytes', models.PositiveBigIntegerField(help_text='Of a member alone.', null=True)),
                ('requests_per_minute', models.PositiveIntegerField(null=True)),
                ('tokens_per_minute', models.PositiveIntegerField(null=True)),
                ('updated_by', models.CharField(max_length=64)),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('project', models.ForeignKey(help_text='The project whose jobs and keys it covers.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project')),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'member_id'), name='allowance_once_of_a_member'),
                    models.UniqueConstraint(fields=('organization', 'label'), name='allowance_once_of_a_label'),
                    models.CheckConstraint(condition=models.Q(('concurrent_gpus', None), ('gpu_seconds_per_month', None), ('queued_jobs', None), ('requests_per_minute', None), ('storage_bytes', None), ('tokens_per_minute', None), _negated=True), name='allowance_limits'),
                    models.UniqueConstraint(fields=('organization', 'project'), name='allowance_once_of_a_project'),
                    models.CheckConstraint(condition=models.Q(models.Q(('label', None), ('member_id__isnull', False), ('project', None)), models.Q(('label__isnull', False), ('member_id', None), ('project', None)), models.Q(('label', None), ('member_id', None), ('project__isnull', False)), _connector='OR'), name='allowance_of_one'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='allowance_key_news',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='INSERT OR UPDATE OR DELETE',
                            table='finetuning_allowance',
                            when='AFTER',
                            func="PERFORM pg_notify('anneal_keys', coalesce(NEW.organization_id, OLD.organization_id)); RETURN NULL;",
                            hash='f70a92ec94b600a5d7ea1765e6d41f518c896f29',
                            pgid='pgtrigger_allowance_key_news_d52bd',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='QueueRanking',
            fields=[
                ('pool', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='+', serialize=False, to='finetuning.gpupool')),
                ('made_at', models.DateTimeField()),
                ('kept_until', models.DateTimeField(help_text='The next claim after it ranks again.')),
                ('holders', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=40), size=None)),
                ('organizations', django.contrib.postgres.fields.ArrayField(base_field=models.TextField(), help_text='The ids of its waiting ones, with commas.', size=None)),
                ('numbers', django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), size=None)),
                ('served', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), size=None)),
                ('rooms', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(null=True), size=None)),
            ],
        ),
    ]
