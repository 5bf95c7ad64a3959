"""Events of organizations, webhook endpoints and their delivery log."""

import apps.core.ids
import django.contrib.postgres.fields
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0010_user_language'),
    ]

    operations = [
        migrations.AlterField(
            model_name='notification',
            name='kind',
            field=models.CharField(choices=[('job', 'Fine-tune'), ('balance', 'Low balance'), ('budget', 'Budget'), ('invoice', 'Invoice'), ('credit', 'Credit'), ('member', 'Member'), ('webhook', 'Webhook')], max_length=8),
        ),
        migrations.CreateModel(
            name='OrganizationEvent',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='evt', primary_key=True, separator='_', serialize=False)),
                ('type', models.CharField(help_text='Such as fine_tuning.job.succeeded.', max_length=64)),
                ('subject', models.CharField(help_text='The id of the object that it is about.', max_length=64)),
                ('data', models.JSONField(default=dict, help_text="What programs learn beside the subject's id.")),
                ('title', models.CharField(max_length=200)),
                ('path', models.CharField(help_text='The page about it.', max_length=200)),
                ('key', models.CharField(help_text='An event that is repeated with its key is the same event.', max_length=200)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
            ],
        ),
        migrations.CreateModel(
            name='WebhookEndpoint',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=29, prefix='we', primary_key=True, separator='_', serialize=False)),
                ('url', models.CharField(max_length=400)),
                ('event_types', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=64), size=None)),
                ('format', models.CharField(choices=[('standard', 'Standard Webhooks'), ('slack', 'Slack')], max_length=8)),
                ('secret_sealed', models.BinaryField()),
                ('previous_sealed', models.BinaryField(help_text='Signs as well until previous_until.', null=True)),
                ('previous_until', models.DateTimeField(null=True)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('paused_at', models.DateTimeField(null=True)),
                ('disabled_because', models.CharField(blank=True, db_default='', max_length=200)),
                ('failing_since', models.DateTimeField(null=True)),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='WebhookDelivery',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='whd', primary_key=True, separator='_', serialize=False)),
                ('status', models.CharField(choices=[('pending', 'Pending'), ('delivered', 'Delivered'), ('failed', 'Failed')], default='pending', max_length=10)),
                ('attempts', models.PositiveSmallIntegerField(default=0)),
                ('attempts_left', models.PositiveSmallIntegerField()),
                ('response_code', models.PositiveSmallIntegerField(null=True)),
                ('response_text', models.CharField(blank=True, max_length=500)),
                ('error', models.CharField(blank=True, max_length=200)),
                ('duration_ms', models.PositiveIntegerField(null=True)),
                ('attempted_at', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('event', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.organizationevent')),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('endpoint', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='deliveries', to='accounts.webhookendpoint')),
            ],
        ),
        migrations.AddIndex(
            model_name='organizationevent',
            index=models.Index(fields=['created_at'], name='event_age'),
        ),
        migrations.AddConstraint(
            model_name='organizationevent',
            constraint=models.UniqueConstraint(fields=('organization', 'key'), name='event_once'),
        ),
        migrations.AddIndex(
            model_name='webhookdelivery',
            index=models.Index(fields=['endpoint', '-id'], name='webhook_delivery_newest'),
        ),
        migrations.AddIndex(
            model_name='webhookdelivery',
            index=models.Index(fields=['created_at'], name='webhook_delivery_age'),
        ),
        migrations.AddConstraint(
            model_name='webhookdelivery',
            constraint=models.UniqueConstraint(fields=('endpoint', 'event'), name='webhook_delivery_once'),
        ),
    ]
