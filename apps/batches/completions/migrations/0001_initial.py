"""Stored completions."""

import apps.core.ids
import django.db.models.deletion
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='StoredCompletion',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=35, prefix='chatcmpl', primary_key=True, separator='-', serialize=False)),
                ('key_id', models.CharField(max_length=64)),
                ('request_id', models.CharField(max_length=64)),
                ('model_name', models.CharField(max_length=200)),
                ('metadata', models.JSONField(default=dict)),
                ('request', models.TextField(help_text='JSON: the messages, tools and settings of the request.')),
                ('answer', models.TextField(help_text='JSON: choices and usage.')),
                ('bytes', models.PositiveIntegerField(help_text='Counts as storage.')),
                ('created_at', models.DateTimeField(help_text='`created` of the answer.')),
                ('deleted_at', models.DateTimeField(help_text='Hidden since then, and without its content.', null=True)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project')),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', 'created_at', 'id'], name='completion_in_order'),
                    models.Index(fields=['organization', 'model_name', 'created_at', 'id'], name='completion_of_model'),
                    models.Index(fields=['organization'], include=('bytes',), name='completion_bytes'),
                    models.Index(fields=['created_at'], name='completion_age'),
                ],
            },
        ),
    ]
