"""An index of pending deliveries, which are counted before each new one."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0012_key_descent'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='webhookdelivery',
            index=models.Index(condition=models.Q(('status', 'pending')), fields=['endpoint'], name='webhook_delivery_pending'),
        ),
    ]
