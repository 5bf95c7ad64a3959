"""People choose the language of pages and mails."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0009_saved_view'),
    ]

    operations = [
        migrations.AddField(
            model_name='user',
            name='language',
            field=models.CharField(blank=True, db_default='', help_text='Of pages and mails; empty: of the browser, and English mails.', max_length=8),
        ),
    ]
