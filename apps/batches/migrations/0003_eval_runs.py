"""Batches that a run of an eval asks."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('batches', '0002_limits'),
    ]

    operations = [
        migrations.AddField(
            model_name='batch',
            name='eval_run',
            field=models.CharField(db_default='', default='', help_text="The run of an eval that asks; empty for a customer's own.", max_length=40),
        ),
    ]
