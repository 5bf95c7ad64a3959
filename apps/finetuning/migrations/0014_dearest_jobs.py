from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('finetuning', '0013_shared_rankings'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='finetuningjob',
            index=models.Index(fields=['organization', '-cost_nano', '-id'], name='job_dearest'),
        ),
    ]
