"""Each stored completion is in a project: that of its key, or else the default one."""

import django.db.models.deletion
from django.db import migrations, models

_MOVE = """
    UPDATE completions_storedcompletion SET project_id = coalesce(
        (SELECT key.project_id FROM accounts_apikey AS key WHERE key.id = completions_storedcompletion.key_id),
        replace(organization_id, 'org_', 'proj_')
    )
"""


def project(*, is_null: bool) -> models.ForeignKey:
    return models.ForeignKey(
        null=is_null, on_delete=django.db.models.deletion.PROTECT, related_name="+", to="accounts.project"
    )


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0001_initial"),
        ("completions", "0001_initial"),
    ]

    operations = [
        migrations.AddField(model_name="storedcompletion", name="project", field=project(is_null=True)),
        migrations.RunSQL(
            [_MOVE, "SET CONSTRAINTS ALL IMMEDIATE", "SET CONSTRAINTS ALL DEFERRED"], migrations.RunSQL.noop
        ),
        migrations.AlterField(model_name="storedcompletion", name="project", field=project(is_null=False)),
    ]
