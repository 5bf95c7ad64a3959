"""The failure of a job can be dismissed from the overview."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('finetuning', '0007_worker_kinds'),
    ]

    operations = [
        migrations.AddField(
            model_name='finetuningjob',
            name='dismissed_at',
            field=models.DateTimeField(help_text='When its failure was dismissed from the overview.', null=True),
        ),
    ]
