from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("adapters", "0002_engine_names")]

    operations = [
        migrations.AlterField(
            model_name="adapterversion",
            name="number",
            field=models.PositiveIntegerField(help_text="Null: a checkpoint, no version of its own.", null=True),
        ),
    ]
