"""Each job is in a project, and a project may have an allowance."""

import django.db.models.deletion
from django.db import migrations, models

MOVE_JOBS = "UPDATE finetuning_finetuningjob SET project_id = replace(organization_id, 'org_', 'proj_')"


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0002_projects'),
        ('finetuning', '0009_allowances'),
    ]

    operations = [
        migrations.AddField(
            model_name='finetuningjob',
            name='project',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project'),
        ),
        migrations.RunSQL(
            [MOVE_JOBS, "SET CONSTRAINTS ALL IMMEDIATE", "SET CONSTRAINTS ALL DEFERRED"], migrations.RunSQL.noop
        ),
        migrations.AlterField(
            model_name='finetuningjob',
            name='project',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project'),
        ),
        migrations.RemoveConstraint(
            model_name='allowance',
            name='allowance_of_one',
        ),
        migrations.AddField(
            model_name='allowance',
            name='project',
            field=models.ForeignKey(help_text='The project whose jobs it covers.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project'),
        ),
        migrations.AddConstraint(
            model_name='allowance',
            constraint=models.UniqueConstraint(fields=('organization', 'project'), name='allowance_once_of_a_project'),
        ),
        migrations.AddConstraint(
            model_name='allowance',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('label', None), ('member_id__isnull', False), ('project', None)), models.Q(('label__isnull', False), ('member_id', None), ('project', None)), models.Q(('label', None), ('member_id', None), ('project__isnull', False)), _connector='OR'), name='allowance_of_one'),
        ),
    ]
