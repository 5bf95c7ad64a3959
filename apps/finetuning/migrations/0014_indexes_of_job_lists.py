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
        migrations.RemoveIndex(
            model_name='finetuningjob',
            name='job_newest',
        ),
        migrations.AddIndex(
            model_name='finetuningjob',
            index=models.Index(fields=['organization', '-created_at', '-id'], include=('suffix', 'training_file', 'base_model'), name='job_newest'),
        ),
    ]
