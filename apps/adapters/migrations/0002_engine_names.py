"""Engine names are random: those of before stay."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('adapters', '0001_initial')]

    operations = [
        migrations.AlterField(
            model_name='adapterversion',
            name='lora_name',
            field=models.CharField(help_text="The engine's name: a- and 26 at random.", max_length=28, unique=True),
        ),
    ]
