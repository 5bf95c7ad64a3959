"""A result is hashed once, before its run ends."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('finetuning', '0002_stalls')]

    operations = [
        migrations.AddField(
            model_name='upload',
            name='verified_at',
            field=models.DateTimeField(help_text='When every file was read and had the promised hash.', null=True),
        ),
    ]
