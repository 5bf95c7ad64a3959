import django.db.models.deletion
from django.db import migrations, models

from apps.finetuning.lifecycle import JobStatus


class Migration(migrations.Migration):

    dependencies = [
        ('finetuning', '0006_retraining'),
    ]

    operations = [
        migrations.AlterField(
            model_name='run',
            name='worker',
            field=models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='runs', to='finetuning.worker'),
        ),
        migrations.AlterField(
            model_name='runmember',
            name='worker',
            field=models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name='memberships', to='finetuning.worker'),
        ),
        migrations.AddIndex(
            model_name='finetuningjob',
            index=models.Index(fields=['-created_at', '-id'], name='job_newest_of_all'),
        ),
        migrations.AddIndex(
            model_name='finetuningjob',
            index=models.Index(condition=models.Q(('status__in', (JobStatus['VALIDATING_FILES'], JobStatus['QUEUED'], JobStatus['RUNNING'], JobStatus['PAUSING'], JobStatus['PAUSED']))), fields=['status', 'created_at', 'id', 'organization'], name='job_open'),
        ),
        migrations.AddIndex(
            model_name='finetuningjob',
            index=models.Index(condition=models.Q(('finished_at__isnull', False)), fields=['-finished_at', 'organization'], name='job_ended'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(fields=['finished_at'], name='run_ended_of_all'),
        ),
        migrations.AddIndex(
            model_name='run',
            index=models.Index(fields=['worker', '-leased_at', '-id'], name='run_of_worker'),
        ),
        migrations.AddIndex(
            model_name='runmember',
            index=models.Index(fields=['worker', '-id'], name='member_of_worker'),
        ),
        migrations.AddIndex(
            model_name='checkpoint',
            index=models.Index(condition=models.Q(('deleted_at', None)), fields=['organization'], include=['bytes'], name='checkpoint_kept'),
        ),
    ]
