"""Conversations and presets of the playground."""

import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Preset',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=33, prefix='preset', primary_key=True, separator='_', serialize=False)),
                ('membership', models.ForeignKey(help_text='Whose it is; null: shared with the organization.', null=True, on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.membership')),
                ('name', models.CharField(max_length=60)),
                ('settings', models.JSONField(default=dict)),
                ('created_by', models.CharField(max_length=64)),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'membership', 'name'), name='preset_name_once', nulls_distinct=False),
                ],
            },
        ),
        migrations.CreateModel(
            name='SavedConversation',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='conv', primary_key=True, separator='_', serialize=False)),
                ('membership', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.membership')),
                ('title', models.CharField(max_length=80)),
                ('transcript', models.JSONField(default=dict)),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(fields=['membership', '-updated_at', '-id'], name='conversation_newest'),
                ],
            },
        ),
    ]
