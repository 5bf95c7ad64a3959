"""Lookups of hub repositories, and newer commits of installed models."""

import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('catalog', '0004_free_prices'),
    ]

    operations = [
        migrations.AddField(
            model_name='basemodel',
            name='newer_revision',
            field=models.CharField(blank=True, help_text="The hub's head, if it has moved on.", max_length=64),
        ),
        migrations.AddField(
            model_name='basemodel',
            name='revision_checked_at',
            field=models.DateTimeField(null=True),
        ),
        migrations.CreateModel(
            name='HubLookup',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='hub', primary_key=True, separator='_', serialize=False)),
                ('repo', models.CharField(max_length=200)),
                ('revision', models.CharField(blank=True, help_text='Empty: the newest one.', max_length=64)),
                ('token_sealed', models.BinaryField(null=True)),
                ('requested_by', models.CharField(max_length=64)),
                ('requested_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('answered_at', models.DateTimeField(null=True)),
                ('repository', models.JSONField(help_text='apps.catalog.hub.HubRepository; null if the hub refused it.', null=True)),
                ('model', models.JSONField(help_text='Name, config.json, parameters; null if it cannot be used.', null=True)),
                ('refusal', models.CharField(blank=True, help_text='Why it cannot be installed.', max_length=500)),
                ('base_model', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='catalog.basemodel')),
            ],
        ),
    ]
