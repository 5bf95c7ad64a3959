"""Invitations that only the owner of their address may accept."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('accounts', '0001_initial')]

    operations = [
        migrations.AddField(
            model_name='invitation',
            name='only_for_address',
            field=models.BooleanField(default=False, help_text='Only an account that has verified this address may accept it.'),
        ),
    ]
