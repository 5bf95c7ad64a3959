"""An organization that has paid, or whose limits an operator has set, keeps a separate share."""

from django.db import migrations

OWN_SHARE = """
    UPDATE accounts_organization AS organization SET has_own_share = true
     WHERE EXISTS (SELECT FROM billing_creditlot WHERE organization_id = organization.id AND kind = 'paid')
        OR EXISTS (SELECT FROM finetuning_quota WHERE organization_id = organization.id)
"""


class Migration(migrations.Migration):
    dependencies = [
        ('accounts', '0005_share'),
        ('billing', '0002_output_bytes'),
        ('finetuning', '0003_verified_uploads'),
    ]

    operations = [migrations.RunSQL(OWN_SHARE, migrations.RunSQL.noop)]
