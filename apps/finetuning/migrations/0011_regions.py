import django.db.models.deletion
from django.db import migrations, models

# What was typed becomes a region. "unassigned" stood for pools that were only quoted, and "" for none. If all pools are
# in one region, it is the home.
NAMED = """
    UPDATE finetuning_gpupool SET region = 'local' WHERE btrim(region) IN ('', 'unassigned');
    INSERT INTO accounts_region (name, is_home)
        SELECT DISTINCT region, false FROM finetuning_gpupool ON CONFLICT DO NOTHING;
    DELETE FROM accounts_region WHERE name = 'local' AND (SELECT count(*) FROM accounts_region) = 2
        AND NOT EXISTS (SELECT FROM finetuning_gpupool WHERE region = 'local');
    UPDATE accounts_region SET is_home = true WHERE (SELECT count(*) FROM accounts_region) = 1;
"""


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0003_regions'),
        ('finetuning', '0010_projects'),
    ]

    operations = [
        migrations.RunSQL(NAMED, migrations.RunSQL.noop),
        migrations.AlterField(
            model_name='gpupool',
            name='region',
            field=models.ForeignKey(db_column='region', on_delete=django.db.models.deletion.PROTECT, related_name='pools', to='accounts.region'),
        ),
    ]
