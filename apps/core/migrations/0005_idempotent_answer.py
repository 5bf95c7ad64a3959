"""Add the answers to requests with an `Idempotency-Key`."""

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0011_webhooks'),
        ('core', '0004_outbox_tasks'),
    ]

    operations = [
        migrations.CreateModel(
            name='IdempotentAnswer',
            fields=[
                ('id', models.CharField(help_text='SHA-256 of organization, API key and header.', max_length=64, primary_key=True, serialize=False)),
                ('request_sha256', models.CharField(help_text='Of method, address and body.', max_length=64)),
                ('answer_sealed', models.BinaryField(help_text='The JSON; it may hold a secret that is shown once.')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
            ],
            options={
                'indexes': [models.Index(fields=['created_at'], name='idempotent_answer_age')],
            },
        ),
    ]
