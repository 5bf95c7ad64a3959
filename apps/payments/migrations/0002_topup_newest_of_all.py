from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('payments', '0001_initial'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='topup',
            index=models.Index(fields=['-created_at'], name='topup_newest_of_all'),
        ),
    ]
