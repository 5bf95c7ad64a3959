"""An index of the batches that have not ended."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0014_service_accounts'),
        ('batches', '0003_eval_runs'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='batch',
            index=models.Index(
                condition=models.Q(('status__in', ['validating', 'in_progress', 'finalizing', 'cancelling'])),
                fields=['organization', 'created_at'],
                name='batch_active',
            ),
        ),
    ]
