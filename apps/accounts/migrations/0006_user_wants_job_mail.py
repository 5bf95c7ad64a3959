"""People choose whether they get a mail when a job of theirs ends."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0005_share'),
    ]

    operations = [
        migrations.AddField(
            model_name='user',
            name='wants_job_mail',
            field=models.BooleanField(db_default=True, default=True, help_text='Mail when a job of theirs ends.'),
        ),
    ]
