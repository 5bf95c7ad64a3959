"""Keys record the key that made them, and rotated keys the first of them."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0011_webhooks'),
    ]

    operations = [
        migrations.AddField(
            model_name='apikey',
            name='first_key',
            field=models.CharField(blank=True, db_default='', help_text='Of a rotated key: the first, whose budget it shares.', max_length=64),
        ),
        migrations.AddField(
            model_name='apikey',
            name='made_with',
            field=models.CharField(blank=True, db_default='', help_text='The key that made this one, and is revoked with it.', max_length=64),
        ),
        migrations.AddIndex(
            model_name='apikey',
            index=models.Index(fields=['made_with'], name='accounts_ap_made_wi_d2a7c6_idx'),
        ),
        migrations.AddIndex(
            model_name='apikey',
            index=models.Index(fields=['first_key'], name='accounts_ap_first_k_4a3ff1_idx'),
        ),
    ]
