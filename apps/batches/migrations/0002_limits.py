"""Batches count the bytes of their answers, and are set aside after errors."""

import pgtrigger.compiler
import pgtrigger.migrations
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('batches', '0001_initial'),
    ]

    operations = [
        pgtrigger.migrations.RemoveTrigger(
            model_name='batch',
            name='batch_status',
        ),
        migrations.AddField(
            model_name='batch',
            name='faults',
            field=models.PositiveSmallIntegerField(db_default=0, default=0, help_text='Errors of ours since the last answer.'),
        ),
        migrations.AddField(
            model_name='batch',
            name='result_bytes',
            field=models.BigIntegerField(db_default=0, default=0, help_text='Size of the recorded answers.'),
        ),
        migrations.AddField(
            model_name='batch',
            name='retry_at',
            field=models.DateTimeField(help_text='Left out until then, after an error of ours.', null=True),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='batch',
            trigger=pgtrigger.compiler.Trigger(name='batch_status', sql=pgtrigger.compiler.UpsertTriggerSql(declare='DECLARE _is_valid_transition BOOLEAN;', func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{cancelling:cancelled,cancelling:failed,finalizing:completed,finalizing:failed,in_progress:cancelling,in_progress:expired,in_progress:finalizing,validating:cancelling,validating:expired,validating:failed,validating:in_progress}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;', hash='30a6938555267644671a76e249dc28230b9187b1', operation='UPDATE', pgid='pgtrigger_batch_status_f0222', table='batches_batch', when='BEFORE')),
        ),
    ]
