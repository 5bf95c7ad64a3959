from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('finetuning', '0006_fleets'),
    ]

    operations = [
        migrations.AddField(
            model_name='finetuningjob',
            name='traceparent',
            field=models.CharField(blank=True, db_default='', help_text='The trace of its creation.', max_length=55),
        ),
    ]
