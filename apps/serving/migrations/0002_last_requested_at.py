from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('serving', '0001_initial'),
    ]

    operations = [
        migrations.AddField(
            model_name='deployment',
            name='last_requested_at',
            field=models.DateTimeField(help_text='To within a minute; decides which stay loaded.', null=True),
        ),
    ]
