"""What a replica counted is held against what its gateway saw of the answers."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('billing', '0001_initial')]

    operations = [
        migrations.AddField(
            model_name='usageevent',
            name='output_bytes',
            field=models.BigIntegerField(help_text='Of the answer, as the gateway saw it.', null=True),
        ),
    ]
