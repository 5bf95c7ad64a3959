"""Each dataset, and each upload, is in a project: that of the key that made it, or else the default one."""

import django.db.models.deletion
from django.db import migrations, models

_MOVE = """
    UPDATE {table} SET project_id = coalesce(
        (SELECT key.project_id FROM accounts_apikey AS key WHERE key.id = {table}.created_by),
        replace(organization_id, 'org_', 'proj_')
    )
"""
MOVE = [_MOVE.format(table=table) for table in ("datasets_dataset", "datasets_upload")]


def project(*, is_null: bool) -> models.ForeignKey:
    return models.ForeignKey(
        null=is_null, on_delete=django.db.models.deletion.PROTECT, related_name="+", to="accounts.project"
    )


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0002_project_defaults"),
        ("datasets", "0002_starts"),
    ]

    operations = [
        migrations.AddField(model_name="dataset", name="project", field=project(is_null=True)),
        migrations.AddField(model_name="upload", name="project", field=project(is_null=True)),
        migrations.RunSQL(
            [*MOVE, "SET CONSTRAINTS ALL IMMEDIATE", "SET CONSTRAINTS ALL DEFERRED"], migrations.RunSQL.noop
        ),
        migrations.AlterField(model_name="dataset", name="project", field=project(is_null=False)),
        migrations.AlterField(model_name="upload", name="project", field=project(is_null=False)),
        migrations.RemoveConstraint(model_name="dataset", name="dataset_name_once"),
        migrations.AddConstraint(
            model_name="dataset",
            constraint=models.UniqueConstraint(
                models.F("organization"),
                models.F("project"),
                models.F("name"),
                condition=models.Q(("deleted_at", None)),
                name="dataset_name_once",
            ),
        ),
    ]
