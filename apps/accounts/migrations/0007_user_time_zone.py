"""People choose the time zone in which pages show times."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0006_user_wants_job_mail'),
    ]

    operations = [
        migrations.AddField(
            model_name='user',
            name='time_zone',
            field=models.CharField(blank=True, db_default='', help_text="IANA name; empty: the zone of the person's browser.", max_length=64),
        ),
    ]
