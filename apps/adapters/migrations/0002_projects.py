"""Each adapter is in the project of the jobs that made its versions, or of the key that uploaded it.

Until now, jobs of several projects could make versions of one adapter. It stays in an open project if any of them is.
"""

import django.db.models.deletion
from django.db import migrations, models

MOVE = """
    UPDATE adapters_adapter SET project_id = coalesce((
        SELECT project.id
        FROM adapters_adapterversion AS version
        LEFT JOIN finetuning_run AS run ON run.id = version.source
        LEFT JOIN finetuning_checkpoint AS checkpoint ON checkpoint.id = version.source
        LEFT JOIN finetuning_finetuningjob AS job ON job.id = coalesce(run.job_id, checkpoint.job_id)
        LEFT JOIN accounts_apikey AS key ON key.id = version.source
        JOIN accounts_project AS project ON project.id = coalesce(
            job.project_id, key.project_id, replace(version.organization_id, 'org_', 'proj_')
        )
        WHERE version.adapter_id = adapters_adapter.id
        ORDER BY project.is_private, version.created_at, version.id
        LIMIT 1
    ), replace(organization_id, 'org_', 'proj_'))
"""


# An alias that moved between projects does not return to a version that its callers may not see.
FORGET = """
    UPDATE serving_alias SET previous_version_id = NULL
    FROM adapters_adapterversion AS previous
    JOIN adapters_adapter AS theirs ON theirs.id = previous.adapter_id, adapters_adapter AS own
    WHERE previous.id = serving_alias.previous_version_id AND own.id = serving_alias.adapter_id
      AND own.project_id <> theirs.project_id
"""


def project(*, is_null: bool) -> models.ForeignKey:
    return models.ForeignKey(
        null=is_null, on_delete=django.db.models.deletion.PROTECT, related_name="+", to="accounts.project"
    )


class Migration(migrations.Migration):
    dependencies = [
        ("accounts", "0002_project_defaults"),
        ("adapters", "0001_initial"),
        ("finetuning", "0007_traceparent"),
        ("serving", "0002_fleets"),
    ]

    operations = [
        migrations.AddField(model_name="adapter", name="project", field=project(is_null=True)),
        migrations.RunSQL(
            [MOVE, FORGET, "SET CONSTRAINTS ALL IMMEDIATE", "SET CONSTRAINTS ALL DEFERRED"], migrations.RunSQL.noop
        ),
        migrations.AlterField(model_name="adapter", name="project", field=project(is_null=False)),
    ]
