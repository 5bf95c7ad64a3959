from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("finetuning", "0007_inference_limits")]

    operations = [
        migrations.AddField(
            model_name="worker",
            name="memory_bytes",
            field=models.BigIntegerField(help_text="Of the machine itself; null: it has not said.", null=True),
        ),
    ]
