"""Trained adapters and their versions."""

import apps.core.ids
import django.contrib.postgres.fields
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
        ('catalog', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Adapter',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='adp', primary_key=True, separator='_', serialize=False)),
                ('name', models.CharField(max_length=120)),
                ('base_model', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.basemodel')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('deleted_at', models.DateTimeField(null=True)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project')),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='AdapterVersion',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='adpv', primary_key=True, separator='_', serialize=False)),
                ('adapter', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='versions', to='adapters.adapter')),
                ('number', models.PositiveIntegerField(help_text='Null: a checkpoint, no version of its own.', null=True)),
                ('model_name', models.CharField(help_text='ft:<base>:<organization>:<suffix>:<id>', max_length=200, unique=True)),
                ('lora_name', models.CharField(help_text="The engine's name: a- and 26 at random.", max_length=28, unique=True)),
                ('source', models.CharField(help_text='The run that made it.', max_length=64)),
                ('object_prefix', models.CharField(max_length=300)),
                ('manifest', models.JSONField()),
                ('manifest_sha256', models.CharField(max_length=64)),
                ('bytes', models.BigIntegerField()),
                ('rank', models.PositiveSmallIntegerField()),
                ('target_modules', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=40), size=None)),
                ('method', models.CharField(max_length=16)),
                ('chat_template_sha256', models.CharField(max_length=64)),
                ('metrics', models.JSONField(default=dict)),
                ('status', models.CharField(choices=[('checking', 'checking'), ('files_only', 'files only'), ('ready', 'ready'), ('refused', 'refused'), ('uncertified', 'uncertified')], default='checking', max_length=12)),
                ('status_reason', models.CharField(blank=True, max_length=300)),
                ('certified_at', models.DateTimeField(null=True)),
                ('parity', models.JSONField(default=dict, help_text='apps.contracts.parity.ParityResult, {} before any engine spoke')),
                ('report', models.JSONField(default=dict, help_text='apps.contracts.evaluation.EvaluationReport, {} without one')),
                ('exports', models.JSONField(default=list, help_text='Other forms: kind, object_prefix, manifest, bytes')),
                ('missing', models.JSONField(default=list, help_text='What was promised and could not be made: kind, cause')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('deleted_at', models.DateTimeField(null=True)),
                ('export_bytes', models.BigIntegerField(default=0, help_text='Of all exports, kept by a trigger.')),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', '-created_at', '-id'], name='adapter_version_newest'),
                    models.Index(condition=models.Q(('deleted_at', None)), fields=['organization'], include=('bytes', 'export_bytes'), name='adapter_version_kept'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('adapter', 'number'), name='adapter_version_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='adapter_version_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='adapters_adapterversion',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{checking:ready,checking:refused,checking:uncertified,refused:ready,uncertified:ready,uncertified:refused}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='ad785a88569e71395564d67af472ad6c190f63f3',
                            pgid='pgtrigger_adapter_version_status_889ac',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='adapter_version_export_bytes',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='INSERT OR UPDATE OF "exports"',
                            table='adapters_adapterversion',
                            when='BEFORE',
                            func="\n    NEW.export_bytes := coalesce((\n        SELECT sum((export ->> 'bytes')::bigint) FROM jsonb_array_elements(NEW.exports) AS export\n    ), 0);\n    RETURN NEW;\n",
                            hash='640d985ac4038ebbcb41b3be373cfc780a02bc9a',
                            pgid='pgtrigger_adapter_version_export_bytes_14fa0',
                        ),
                    ),
                ],
            },
        ),
    ]
