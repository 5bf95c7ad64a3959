"""Tell log lines from other events, and find both without reading the metrics."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('finetuning', '0008_job_dismissed')]

    operations = [
        migrations.AlterField(
            model_name='jobevent',
            name='type',
            field=models.CharField(default='message', help_text='message | metrics | state | log | samples', max_length=16),
        ),
        migrations.AddIndex(
            model_name='jobevent',
            index=models.Index(condition=models.Q(('type', 'metrics'), _negated=True), fields=['job', 'sequence'], name='job_event_words'),
        ),
    ]
