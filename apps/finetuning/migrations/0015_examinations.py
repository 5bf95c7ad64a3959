"""Trainers compute the numbers for the certificates of uploaded adapters."""

import apps.core.ids
import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0014_service_accounts'),
        ('adapters', '0001_initial'),
        ('finetuning', '0014_rehearsal_answers'),
    ]

    operations = [
        migrations.CreateModel(
            name='Examination',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='exam', primary_key=True, separator='_', serialize=False)),
                ('asked_at', models.DateTimeField()),
                ('taken_at', models.DateTimeField(null=True)),
                ('tries', models.PositiveSmallIntegerField(default=0)),
                ('ended_at', models.DateTimeField(null=True)),
                ('problem', models.CharField(blank=True, help_text='Why there are no numbers, once it has ended.', max_length=300)),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('version', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='adapters.adapterversion')),
                ('worker', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='finetuning.worker')),
            ],
            options={
                'indexes': [models.Index(condition=models.Q(('ended_at', None)), fields=['asked_at'], name='examination_open')],
            },
        ),
    ]
