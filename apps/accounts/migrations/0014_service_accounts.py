"""Service accounts are users of one organization that cannot sign in."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0013_pending_deliveries'),
    ]

    operations = [
        migrations.AddField(
            model_name='user',
            name='service_account_of',
            field=models.ForeignKey(help_text='The organization whose programs act in this name. It cannot sign in. Null: a person.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization'),
        ),
        migrations.AddConstraint(
            model_name='user',
            constraint=models.CheckConstraint(condition=models.Q(('service_account_of', None), ('is_operator', False), _connector='OR'), name='service_account_is_no_operator'),
        ),
        migrations.AddField(
            model_name='apikey',
            name='issued_by',
            field=models.ForeignKey(help_text="Of a service account's key: who created it, and so knows it.", null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.user'),
        ),
    ]
