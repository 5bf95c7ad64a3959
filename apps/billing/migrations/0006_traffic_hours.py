"""Requests by the hour; a usage record may stand for several refused requests."""

import django.contrib.postgres.fields
import django.contrib.postgres.indexes
import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0005_share'),
        ('billing', '0005_low_balance'),
    ]

    operations = [
        migrations.AddField(
            model_name='usageevent',
            name='request_count',
            field=models.IntegerField(db_default=1, help_text='More than one: refused alike, and counted together.'),
        ),
        migrations.AlterField(
            model_name='usageevent',
            name='finish',
            field=models.CharField(help_text='stop, length, aborted; a Refusal; lost: the gateway died meanwhile', max_length=16),
        ),
        migrations.CreateModel(
            name='TrafficHour',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('model_name', models.CharField(blank=True, max_length=200)),
                ('adapter_version_id', models.CharField(blank=True, max_length=40)),
                ('key_id', models.CharField(blank=True, max_length=40)),
                ('hour_at', models.DateTimeField()),
                ('requests', models.BigIntegerField(help_text='All of them, however they ended.')),
                ('aborted', models.BigIntegerField(help_text='The client left before the end of its answer.')),
                ('rate_limited', models.BigIntegerField()),
                ('over_quota', models.BigIntegerField(help_text='No credit, or a budget is reached.')),
                ('not_found', models.BigIntegerField()),
                ('invalid', models.BigIntegerField(help_text='Refused for another reason with a 4xx status.')),
                ('failed', models.BigIntegerField(help_text="The platform's fault: 5xx, or the gateway died meanwhile.")),
                ('input_tokens', models.BigIntegerField()),
                ('cached_input_tokens', models.BigIntegerField()),
                ('output_tokens', models.BigIntegerField()),
                ('cost_nano', models.BigIntegerField(help_text='To a nano for each batch; the ledger has what was charged.')),
                ('first_token_counts', django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), size=None)),
                ('latency_counts', django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), help_text='Of whole answers.', size=None)),
                ('organization', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
            ],
            options={
                'indexes': [models.Index(fields=['organization', 'hour_at'], name='traffic_hour_newest'), django.contrib.postgres.indexes.BrinIndex(fields=['hour_at'], name='traffic_by_time')],
                'constraints': [models.UniqueConstraint(fields=('organization', 'model_name', 'adapter_version_id', 'hour_at', 'key_id'), name='traffic_hour_once')],
            },
        ),
    ]
