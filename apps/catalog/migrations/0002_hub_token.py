"""A separate table for the token of a gated repository, which web and gateway cannot read."""

import django.db.models.deletion
from django.db import migrations, models

from apps.core.secrets.resealing import move_sealed


def move_tokens(apps, schema_editor):
    move_sealed(
        apps.get_model('catalog', 'BaseModel'), 'hub_token_sealed', apps.get_model('catalog', 'HubToken'), 'token_sealed'
    )


class Migration(migrations.Migration):
    dependencies = [('catalog', '0001_initial')]

    operations = [
        migrations.CreateModel(
            name='HubToken',
            fields=[
                ('base_model', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='hub_token', serialize=False, to='catalog.basemodel')),
                ('token_sealed', models.BinaryField()),
            ],
        ),
        migrations.RunPython(move_tokens),
        migrations.RemoveField(model_name='basemodel', name='hub_token_sealed'),
    ]
