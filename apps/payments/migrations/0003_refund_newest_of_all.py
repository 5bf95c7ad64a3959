from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('payments', '0002_topup_newest_of_all'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='cardrefund',
            index=models.Index(fields=['-created_at', '-id'], name='card_refund_newest_of_all'),
        ),
    ]
