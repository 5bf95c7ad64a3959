"""Name the kinds of workers."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('finetuning', '0006_open_measurement')]

    operations = [
        migrations.AlterField(
            model_name='worker',
            name='kind',
            field=models.CharField(choices=[('trainer', 'Trainer: takes fine-tuning runs'), ('replica', 'Replica: serves one model')], default='trainer', max_length=8),
        ),
        migrations.AlterField(
            model_name='workertoken',
            name='kind',
            field=models.CharField(choices=[('trainer', 'Trainer: takes fine-tuning runs'), ('replica', 'Replica: serves one model')], max_length=8),
        ),
    ]
