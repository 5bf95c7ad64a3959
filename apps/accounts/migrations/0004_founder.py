"""The founder of an organization: a person who never paid may found only a few."""

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('accounts', '0003_second_factor')]

    operations = [
        migrations.AddField(
            model_name='organization',
            name='founded_by',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL),
        ),
    ]
