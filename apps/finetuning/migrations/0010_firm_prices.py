"""Add firm prices: a pool's policy and factor, and a job's quoted maximum and limit. Jobs before it are metered."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('finetuning', '0009_log_lines')]

    operations = [
        migrations.AddField(
            model_name='finetuningjob',
            name='firm_limit_nano',
            field=models.BigIntegerField(help_text='What the time of a run may cost before a job with a firm price pauses.', null=True),
        ),
        migrations.AddField(
            model_name='finetuningjob',
            name='firm_max_nano',
            field=models.BigIntegerField(help_text='The quoted maximum, if the price was firm at launch; no cap is above it.', null=True),
        ),
        migrations.AddField(
            model_name='finetuningjob',
            name='overran_at',
            field=models.DateTimeField(help_text='When it reached that limit; an operator continues it.', null=True),
        ),
        migrations.AddField(
            model_name='gpupool',
            name='firm_factor',
            field=models.DecimalField(decimal_places=2, default=3, help_text='A run with a firm price pauses once its time costs this many times the quoted maximum.', max_digits=4),
        ),
        migrations.AddField(
            model_name='gpupool',
            name='price_policy',
            field=models.CharField(choices=[('firm', 'Firm: the customer pays at most the quoted maximum'), ('metered', 'Metered: the customer pays for the time, up to the spend cap')], default='firm', max_length=8),
        ),
        migrations.AddConstraint(
            model_name='finetuningjob',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('firm_limit_nano', None), ('firm_max_nano', None), ('overran_at', None)), models.Q(('firm_limit_nano__gte', models.F('firm_max_nano')), ('firm_limit_nano__isnull', False), ('firm_max_nano__gte', models.F('spend_cap_nano')), ('firm_max_nano__isnull', False)), _connector='OR'), name='job_cap_within_firm_max'),
        ),
        migrations.AddConstraint(
            model_name='gpupool',
            constraint=models.CheckConstraint(condition=models.Q(('firm_factor__gte', 1), ('firm_factor__lte', 10)), name='pool_firm_factor'),
        ),
    ]
