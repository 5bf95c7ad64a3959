"""Keep what each organization waits for, holds and used in each pool; compute why a job waits."""

import apps.finetuning.lifecycle
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
import pgtrigger.migrations
from django.db import migrations, models

_COUNT = """
    INSERT INTO finetuning_queueshare (organization_id, pool_id, queued, queued_since, held_gpus, used_gpu_hours,
        served_at)
    SELECT run.organization_id, run.pool_id, count(*) FILTER (WHERE run.status = 'queued'),
        min(run.created_at) FILTER (WHERE run.status = 'queued'),
        coalesce(sum(job.gpu_count) FILTER (WHERE run.status IN ('leased', 'running')), 0),
        coalesce(sum(job.gpu_count * exp(-extract(epoch FROM now() - run.finished_at)::float8 / 3600)
            * (1 - exp(-least(extract(epoch FROM run.finished_at - run.leased_at)::float8 / 3600, 500))))
            FILTER (WHERE run.finished_at BETWEEN now() - interval '1 day' AND now() AND run.leased_at IS NOT NULL), 0),
        max(run.leased_at)
    FROM finetuning_run run JOIN finetuning_finetuningjob job ON job.id = run.job_id
    GROUP BY 1, 2
"""


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0013_pending_deliveries'),
        ('finetuning', '0012_capacity'),
    ]

    operations = [
        migrations.CreateModel(
            name='QueueShare',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('queued', models.IntegerField(db_default=0)),
                ('queued_since', models.DateTimeField(help_text='When the oldest run came since none was queued.', null=True)),
                ('held_gpus', models.IntegerField(db_default=0)),
                ('used_gpu_hours', models.FloatField(db_default=0.0, help_text='Of ended attempts; after each hour 1/e of it is left.')),
                ('used_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), help_text='When used_gpu_hours had its value.')),
                ('served_at', models.DateTimeField(help_text='When a worker last took one of its runs.', null=True)),
            ],
        ),
        migrations.RemoveIndex(
            model_name='run',
            name='run_queue',
        ),
        migrations.RemoveField(
            model_name='finetuningjob',
            name='waiting_reason',
        ),
        migrations.AddField(
            model_name='run',
            name='retry_at',
            field=models.DateTimeField(help_text='No claim takes it before: a limit of the month held it back, or its group did not come together.', null=True),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(condition=models.Q(('status', apps.finetuning.lifecycle.RunStatus['QUEUED'])), fields=['pool', 'organization', 'created_at', 'id'], name='run_queue'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(fields=['organization', 'finished_at'], name='run_ended'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(condition=models.Q(('training_started_at', None), _negated=True), fields=['pool', 'finished_at'], name='run_trained'),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='run',
            trigger=pgtrigger.compiler.Trigger(name='run_share', sql=pgtrigger.compiler.UpsertTriggerSql(declare="DECLARE said finetuning_run := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END; added_queued integer := coalesce((NEW.status IN ('queued'))::int, 0) - coalesce((OLD.status IN ('queued'))::int, 0); added_held integer := coalesce((NEW.status IN ('leased', 'running'))::int, 0) - coalesce((OLD.status IN ('leased', 'running'))::int, 0); moment timestamptz := clock_timestamp(); gpus integer; hours double precision := 0;", func='\n    IF added_queued = 0 AND added_held = 0 THEN\n        RETURN NULL;\n    END IF;\n    SELECT gpu_count INTO gpus FROM finetuning_finetuningjob WHERE id = said.job_id;\n    gpus := coalesce(gpus, 1);\n    IF added_held < 0 AND said.leased_at IS NOT NULL THEN\n        hours := greatest(extract(epoch FROM moment - said.leased_at)::float8, 0) / 3600;\n    END IF;\n    FOR attempt IN 1..2 LOOP\n        UPDATE finetuning_queueshare SET\n            queued = queued + added_queued,\n            queued_since = CASE\n                WHEN queued + added_queued = 0 THEN NULL WHEN queued = 0 THEN said.created_at ELSE queued_since\n            END,\n            held_gpus = held_gpus + added_held * gpus,\n            used_gpu_hours = used_gpu_hours\n                * exp(-least(greatest(extract(epoch FROM moment - used_at)::float8, 0) / 3600, 500))\n                + gpus * (1 - exp(-least(hours, 500))),\n            used_at = moment,\n            served_at = CASE WHEN added_held > 0 THEN said.leased_at ELSE served_at END\n        WHERE organization_id = said.organization_id AND pool_id = said.pool_id;\n        EXIT WHEN FOUND;\n        INSERT INTO finetuning_queueshare (organization_id, pool_id) VALUES (said.organization_id, said.pool_id)\n            ON CONFLICT DO NOTHING;\n    END LOOP;\n    RETURN NULL;\n', hash='d9aff1a87e16c693bec705bb5aaa6945dd404ae6', operation='INSERT OR UPDATE OF "status" OR DELETE', pgid='pgtrigger_run_share_ac7e3', table='finetuning_run', when='AFTER')),
        ),
        migrations.AddField(
            model_name='queueshare',
            name='organization',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization'),
        ),
        migrations.AddField(
            model_name='queueshare',
            name='pool',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='finetuning.gpupool'),
        ),
        migrations.AddIndex(
            model_name='queueshare',
            index=models.Index(condition=models.Q(('queued__gt', 0)), fields=['pool'], name='queue_share_waiting'),
        ),
        migrations.AddConstraint(
            model_name='queueshare',
            constraint=models.UniqueConstraint(fields=('pool', 'organization'), name='queue_share_once'),
        ),
        migrations.RunSQL(_COUNT, migrations.RunSQL.noop),
    ]
