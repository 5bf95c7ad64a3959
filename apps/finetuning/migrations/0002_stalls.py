from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("finetuning", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="run",
            name="work",
            field=models.BigIntegerField(
                default=0, help_text="Units of work, as its worker counts them: without any for long, it is stalled."
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="idle_ms",
            field=models.BigIntegerField(default=0, help_text="Time between heartbeats since the last work."),
        ),
        migrations.AddField(
            model_name="run",
            name="stepless_ms",
            field=models.BigIntegerField(default=0, help_text="Time between heartbeats since the last new step."),
        ),
    ]
