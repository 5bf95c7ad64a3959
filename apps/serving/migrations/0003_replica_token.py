"""The token of a replica stands in a table of its own, which web cannot read."""

import django.db.models.deletion
from django.db import migrations, models

from apps.core.secrets.resealing import move_sealed


def move_tokens(apps, schema_editor):
    move_sealed(
        apps.get_model('serving', 'Replica'), 'token_sealed', apps.get_model('serving', 'ReplicaToken'), 'token_sealed'
    )


class Migration(migrations.Migration):
    dependencies = [('serving', '0002_isolated_replicas')]

    operations = [
        migrations.CreateModel(
            name='ReplicaToken',
            fields=[
                ('replica', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='token', serialize=False, to='serving.replica')),
                ('token_sealed', models.BinaryField()),
            ],
        ),
        migrations.RunPython(move_tokens),
        migrations.RemoveField(model_name='replica', name='token_sealed'),
    ]
