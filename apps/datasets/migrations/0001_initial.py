"""Uploaded files, and what was found in them."""

import apps.core.ids
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
            name='Dataset',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=29, prefix='ds', primary_key=True, separator='_', serialize=False)),
                ('name', models.CharField(max_length=120)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('deleted_at', models.DateTimeField(null=True)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project')),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(models.F('organization'), models.F('project'), models.F('name'), condition=models.Q(('deleted_at', None)), name='dataset_name_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='DatasetVersion',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='file', primary_key=True, separator='-', serialize=False)),
                ('dataset', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='versions', to='datasets.dataset')),
                ('number', models.PositiveIntegerField()),
                ('status', models.CharField(choices=[('deleted', 'deleted'), ('invalid', 'invalid'), ('ready', 'ready'), ('uploaded', 'uploaded'), ('validating', 'validating')], default='uploaded', max_length=16)),
                ('purpose', models.CharField(default='fine-tune', max_length=24)),
                ('filename', models.CharField(max_length=255)),
                ('object_key', models.CharField(help_text='The file as it was uploaded.', max_length=300)),
                ('bytes', models.BigIntegerField()),
                ('sha256', models.CharField(help_text='Empty until a repaired version is written.', max_length=64)),
                ('kind', models.CharField(default='', help_text='chat, preference or text; empty until known.', max_length=16)),
                ('layout', models.JSONField(default=dict, help_text='What the file is: container, mapping, columns, first rows.')),
                ('given_mapping', models.JSONField(help_text='Which column is what, where a person said so.', null=True)),
                ('rows_key', models.CharField(default='', help_text='Its rows as JSONL, unless the file is that.', max_length=300)),
                ('rows_bytes', models.BigIntegerField(default=0)),
                ('rows_sha256', models.CharField(default='', max_length=64)),
                ('derived_from', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='derived', to='datasets.datasetversion')),
                ('repair', models.CharField(default='', help_text='How the rows of `derived_from` become this file.', max_length=8)),
                ('rows', models.BigIntegerField(null=True)),
                ('error_count', models.BigIntegerField(default=0)),
                ('errors', models.JSONField(default=list, help_text='First problems: line, code, message, param, fix.')),
                ('line_offsets', models.JSONField(default=list, help_text='Where every LINES_PER_OFFSET-th line starts, for paging.')),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('expires_at', models.DateTimeField(null=True)),
                ('validation_lease_expires_at', models.DateTimeField(help_text='Renewed by the validating task. Expired means that the task died.', null=True)),
                ('validation_attempts', models.PositiveSmallIntegerField(default=0, help_text='Also those that ended with a worker.')),
                ('validated_at', models.DateTimeField(null=True)),
                ('dismissed_at', models.DateTimeField(help_text='Since then its errors need no attention.', null=True)),
                ('deleted_at', models.DateTimeField(null=True)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', '-created_at', '-id'], name='dataset_version_newest'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('dataset', 'number'), name='dataset_version_once'),
                    models.CheckConstraint(condition=models.Q(('bytes__gte', 0), ('error_count__gte', 0)), name='dataset_version_sizes'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='dataset_version_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='datasets_datasetversion',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{invalid:deleted,invalid:uploaded,ready:deleted,uploaded:deleted,uploaded:validating,validating:invalid,validating:ready,validating:uploaded}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='82c78172910a1aa09a88448e94bdb67fc06b5298',
                            pgid='pgtrigger_dataset_version_status_07241',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='TokenCount',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='token_counts', to='datasets.datasetversion')),
                ('base_model', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.basemodel')),
                ('chat_template_sha256', models.CharField(max_length=64)),
                ('tokens', models.BigIntegerField()),
                ('trained_tokens', models.BigIntegerField()),
                ('longest_row_tokens', models.PositiveIntegerField()),
                ('histogram', models.JSONField(help_text='Ascending [upper bound in tokens, rows] pairs.')),
                ('cuts', models.JSONField(default=list, help_text='What each usual limit would cut: apps.datasets.token_counts.Cut.')),
                ('refusal', models.JSONField(help_text="The first row that the model's template cannot render, as a LineError.", null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('starts', models.JSONField(db_default=[], default=list, help_text="Ascending [from, to, rows], by the position of the rows' first trained token.")),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('version', 'base_model', 'chat_template_sha256'), name='token_count_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Upload',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=33, prefix='upload', primary_key=True, separator='_', serialize=False)),
                ('status', models.CharField(choices=[('cancelled', 'cancelled'), ('completed', 'completed'), ('expired', 'expired'), ('pending', 'pending')], default='pending', max_length=16)),
                ('purpose', models.CharField(max_length=24)),
                ('filename', models.CharField(max_length=255)),
                ('mime_type', models.CharField(max_length=120)),
                ('bytes', models.BigIntegerField(help_text='What all parts have together.')),
                ('part_bytes', models.PositiveIntegerField(help_text='The size of planned parts; null where none are.', null=True)),
                ('dataset_name', models.CharField(default='', max_length=120)),
                ('given_mapping', models.JSONField(null=True)),
                ('file_expires_after_seconds', models.PositiveIntegerField(null=True)),
                ('part_ids', models.JSONField(default=list, help_text='The parts it was completed with, in their order.')),
                ('version', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='datasets.datasetversion')),
                ('signed_until', models.DateTimeField(help_text='Until then a client may hold a URL that takes a part; null once none can be used.', null=True)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('expires_at', models.DateTimeField()),
                ('file_id', models.CharField(default='', help_text='The file it became, if that is no version.', max_length=64)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project')),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('status', 'pending')), fields=['expires_at'], name='upload_pending'),
                    models.Index(condition=models.Q(('signed_until__isnull', False)), fields=['signed_until'], name='upload_signed'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('bytes__gt', 0)), name='upload_size'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='upload_status',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            declare='DECLARE _is_valid_transition BOOLEAN;',
                            operation='UPDATE',
                            table='datasets_upload',
                            when='BEFORE',
                            func='SELECT CONCAT(OLD."status", \':\', NEW."status") = ANY(\'{pending:cancelled,pending:completed,pending:expired}\'::text[]) INTO _is_valid_transition; IF (_is_valid_transition IS FALSE AND OLD."status" IS DISTINCT FROM NEW."status") THEN RAISE EXCEPTION \'pgtrigger: Invalid transition of field "status" from "%" to "%" on table %\', OLD."status", NEW."status", TG_TABLE_NAME; ELSE RETURN NEW; END IF;',
                            hash='ac2af8b9120ac8591c9bfaecec700836dfbe7cbb',
                            pgid='pgtrigger_upload_status_fe63c',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='UploadPart',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='part', primary_key=True, separator='_', serialize=False)),
                ('upload', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='parts', to='datasets.upload')),
                ('bytes', models.BigIntegerField()),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='VersionInspection',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('version', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='inspection', to='datasets.datasetversion')),
                ('rules', models.PositiveIntegerField(help_text='apps.datasets.inspection.inspector.INSPECTION_VERSION of the pass.')),
                ('findings', models.JSONField(help_text='apps.datasets.inspection.inspector.Finding, the first rows of each with it.')),
                ('distinct_rows', models.BigIntegerField()),
                ('identities_key', models.CharField(help_text='Eight bytes for each row: what decides its split.', max_length=300)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('line_steps', models.BinaryField(db_default=b'', help_text='Four bytes for each row, as zlib: how many lines it is after the one before. Empty: one each.')),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='VersionComparison',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='comparisons', to='datasets.datasetversion')),
                ('other', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='datasets.datasetversion')),
                ('rules', models.PositiveIntegerField(help_text='apps.datasets.inspection.comparisons.COMPARISON_VERSION it was made by.')),
                ('equal_rows', models.BigIntegerField(help_text='Stand in the other version too, but for case and spacing.')),
                ('near_rows', models.BigIntegerField(help_text='Nearly repeat one of it.')),
                ('marks', models.BinaryField(help_text='A byte for each row, apps.contracts.splits.held_rows.Repeats, as zlib.')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('version', 'other'), name='compared_once'),
                ],
            },
        ),
    ]
