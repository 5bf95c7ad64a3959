"""Keep the answers of several workers to a rehearsal, and count interrupted ones apart."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("finetuning", "0013_queue_shares"),
    ]

    operations = [
        migrations.RenameField("memoryrehearsal", "tries", "takes"),
        migrations.AlterField(
            model_name="memoryrehearsal",
            name="takes",
            field=models.PositiveSmallIntegerField(
                default=0, help_text="By workers, those that were interrupted included."
            ),
        ),
        migrations.AddField(
            model_name="memoryrehearsal",
            name="answers",
            field=models.JSONField(
                default=list, help_text="Not believed yet: worker, and memory or null."
            ),
        ),
        migrations.AlterField(
            model_name="memoryrehearsal",
            name="computed_bytes",
            field=models.BigIntegerField(help_text="Peak by the formula; a figure far from it is refused."),
        ),
        migrations.AlterField(
            model_name="memoryrehearsal",
            name="report",
            field=models.JSONField(help_text="Believed: apps.contracts.runs.MemoryReport", null=True),
        ),
    ]
