from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('finetuning', '0014_dearest_jobs'),
    ]

    operations = [
        migrations.RemoveIndex(
            model_name='finetuningjob',
            name='job_newest',
        ),
        migrations.AddIndex(
            model_name='finetuningjob',
            index=models.Index(fields=['organization', '-created_at', '-id'], include=('suffix', 'training_file', 'base_model'), name='job_newest'),
        ),
    ]
