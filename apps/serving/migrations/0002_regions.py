import django.db.models.deletion
from django.db import migrations, models

OF_ITS_POOL = """
    UPDATE serving_replica SET region_id = coalesce(
        (SELECT pool.region FROM finetuning_worker worker JOIN finetuning_gpupool pool ON pool.id = worker.pool_id
            WHERE worker.id = serving_replica.worker_id),
        (SELECT name FROM accounts_region WHERE is_home)
    );
"""


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0003_regions'),
        ('finetuning', '0011_regions'),
        ('serving', '0001_initial'),
    ]

    operations = [
        migrations.AddField(
            model_name='replica',
            name='region',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='replicas', to='accounts.region'),
        ),
        migrations.RunSQL(OF_ITS_POOL, migrations.RunSQL.noop),
        migrations.AlterField(
            model_name='replica',
            name='region',
            field=models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='replicas', to='accounts.region'),
        ),
    ]
