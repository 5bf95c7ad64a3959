from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('core', '0001_initial'),
    ]

    operations = [
        migrations.AddField(
            model_name='outboxmessage',
            name='traceparent',
            field=models.CharField(blank=True, db_default='', help_text='The trace that it continues.', max_length=55),
        ),
    ]
