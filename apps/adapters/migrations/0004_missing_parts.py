from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("adapters", "0003_checkpoint_number")]

    operations = [
        migrations.AddField(
            model_name="adapterversion",
            name="missing",
            field=models.JSONField(default=list, help_text="What was promised and could not be made: kind, cause"),
        ),
    ]
