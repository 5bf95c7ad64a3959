"""Notifications of members, and the mails that a person turns off."""

import django.db.models.deletion
import django.db.models.functions.datetime
from django.conf import settings
from django.db import migrations, models

import apps.core.ids


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0007_user_time_zone'),
    ]

    operations = [
        migrations.AddField(
            model_name='user',
            name='wants_balance_mail',
            field=models.BooleanField(db_default=True, default=True, help_text='Mail when a balance is low.'),
        ),
        migrations.AddField(
            model_name='user',
            name='wants_budget_mail',
            field=models.BooleanField(db_default=True, default=True, help_text='Mail when a budget is reached.'),
        ),
        migrations.AddField(
            model_name='user',
            name='wants_invoice_mail',
            field=models.BooleanField(db_default=True, default=True, help_text='Mail when an invoice is issued.'),
        ),
        migrations.CreateModel(
            name='Notification',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='note', primary_key=True, separator='_', serialize=False)),
                ('kind', models.CharField(choices=[('job', 'Fine-tune'), ('balance', 'Low balance'), ('budget', 'Budget'), ('invoice', 'Invoice'), ('credit', 'Credit'), ('member', 'Member')], max_length=8)),
                ('title', models.CharField(max_length=200)),
                ('path', models.CharField(help_text='The page about it.', max_length=200)),
                ('key', models.CharField(help_text='Of the event: an event that is repeated is one notification.', max_length=200)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('read_at', models.DateTimeField(null=True)),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'indexes': [models.Index(fields=['organization', 'user', '-id'], name='notification_newest'), models.Index(condition=models.Q(('read_at', None)), fields=['user', 'organization'], name='notification_unread'), models.Index(fields=['created_at'], name='notification_age')],
                'constraints': [models.UniqueConstraint(fields=('organization', 'user', 'key'), name='notification_once')],
            },
        ),
    ]
