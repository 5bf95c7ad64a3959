"""Each eval is in a project: that of the key that made it, or else the default one."""

import django.db.models.deletion
from django.db import migrations, models

MOVE = """
    UPDATE evals_eval SET project_id = coalesce(
        (SELECT key.project_id FROM accounts_apikey AS key WHERE key.id = evals_eval.created_by),
        replace(organization_id, 'org_', 'proj_')
    )
"""


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0001_initial'),
        ('evals', '0001_initial'),
    ]

    operations = [
        migrations.AddField(
            model_name='eval',
            name='project',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project'),
        ),
        migrations.RunSQL(
            [MOVE, "SET CONSTRAINTS ALL IMMEDIATE", "SET CONSTRAINTS ALL DEFERRED"], migrations.RunSQL.noop
        ),
        migrations.AlterField(
            model_name='eval',
            name='project',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project'),
        ),
    ]
