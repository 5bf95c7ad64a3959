"""Rename the model of a run's uploads; its table keeps its name."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('finetuning', '0004_shares')]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.RenameModel('Upload', 'RunUpload'),
                migrations.AlterModelTable('runupload', 'finetuning_upload'),
            ]
        ),
        migrations.AlterField(
            model_name='poolaccuracy',
            name='report',
            field=models.JSONField(help_text='apps.finetuning.pools.accuracy.AccuracyReport'),
        ),
    ]
