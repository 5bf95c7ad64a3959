from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0003_key_spend_limit'),
    ]

    operations = [
        migrations.AddField(
            model_name='invitation',
            name='made_with',
            field=models.CharField(blank=True, db_default='', help_text='The API key that sent it, with which it is revoked.', max_length=64),
        ),
    ]
