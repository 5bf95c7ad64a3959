from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0002_project_defaults'),
    ]

    operations = [
        migrations.AddField(
            model_name='apikey',
            name='spend_limit_nano',
            field=models.BigIntegerField(help_text='Of its whole life; null: no limit of its own.', null=True),
        ),
    ]
