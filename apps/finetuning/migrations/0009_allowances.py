import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0001_initial'),
        ('finetuning', '0008_gpu_days'),
    ]

    operations = [
        migrations.AddField(
            model_name='finetuningjob',
            name='member_id',
            field=models.CharField(blank=True, default='', help_text='The member behind it, whose allowance counts.', max_length=40),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name='finetuningjob',
            name='labels',
            field=models.JSONField(default=dict, help_text='Its metadata, and the labels of the key that created it.'),
        ),
        migrations.AddField(
            model_name='finetuningjob',
            name='moved_gpu_ms',
            field=models.BigIntegerField(default=0, help_text='Of these, those billed before its last move.'),
        ),
        migrations.AddField(
            model_name='finetuningjob',
            name='moved_nano',
            field=models.BigIntegerField(default=0, help_text='What these cost, at the prices of the pools before.'),
        ),
        migrations.CreateModel(
            name='Allowance',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='allow', primary_key=True, separator='_', serialize=False)),
                ('member_id', models.CharField(help_text='The member whose jobs it covers.', max_length=40, null=True)),
                ('label', models.JSONField(help_text='The label whose jobs it covers: one name and its value.', null=True)),
                ('concurrent_gpus', models.PositiveIntegerField(null=True)),
                ('queued_jobs', models.PositiveIntegerField(null=True)),
                ('gpu_seconds_per_month', models.PositiveBigIntegerField(null=True)),
                ('updated_by', models.CharField(max_length=64)),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'member_id'), name='allowance_once_of_a_member'),
                    models.UniqueConstraint(fields=('organization', 'label'), name='allowance_once_of_a_label'),
                    models.CheckConstraint(condition=models.Q(models.Q(('label__isnull', True), ('member_id__isnull', False)), models.Q(('label__isnull', False), ('member_id__isnull', True)), _connector='OR'), name='allowance_of_one'),
                    models.CheckConstraint(condition=models.Q(('concurrent_gpus', None), ('gpu_seconds_per_month', None), ('queued_jobs', None), _negated=True), name='allowance_limits'),
                ],
            },
        ),
    ]
