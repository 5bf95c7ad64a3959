import django.contrib.postgres.indexes
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0001_initial'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='hold',
            index=models.Index(condition=models.Q(('status', 'open')), fields=['organization', '-created_at', '-id'], name='hold_open'),
        ),
        migrations.AddIndex(
            model_name='hold',
            index=models.Index(condition=models.Q(('purpose', 'job')), fields=['source'], name='hold_of_job'),
        ),
        migrations.AddIndex(
            model_name='hold',
            index=models.Index(condition=models.Q(('purpose', 'job')), fields=['organization', 'closed_at'], name='hold_of_jobs_closed'),
        ),
        migrations.AddIndex(
            model_name='hold',
            index=models.Index(condition=models.Q(('purpose', 'job')), fields=['closed_at'], name='hold_closed_of_all'),
        ),
        migrations.AddIndex(
            model_name='ledgerentry',
            index=django.contrib.postgres.indexes.BrinIndex(fields=['created_at'], name='entry_by_time'),
        ),
        migrations.AddIndex(
            model_name='ledgertransaction',
            index=models.Index(condition=models.Q(('kind', 'usage'), _negated=True), fields=['source'], name='txn_source'),
        ),
        migrations.AddIndex(
            model_name='ledgertransaction',
            index=models.Index(condition=models.Q(('kind', 'estimate_loss')), fields=['created_at'], name='txn_estimate_losses'),
        ),
        migrations.AddIndex(
            model_name='usageseries',
            index=models.Index(fields=['organization', 'day'], name='usage_series_day'),
        ),
        migrations.AddIndex(
            model_name='usageseries',
            index=django.contrib.postgres.indexes.BrinIndex(fields=['day'], name='usage_series_by_day'),
        ),
    ]
