"""Members save the filters and the order of a list under a name."""

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

import apps.core.ids


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0008_notifications'),
    ]

    operations = [
        migrations.CreateModel(
            name='SavedView',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='view', primary_key=True, separator='_', serialize=False)),
                ('membership', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='saved_views', to='accounts.membership')),
                ('listing', models.CharField(help_text="The name of the list's address, such as web:job_list.", max_length=40)),
                ('name', models.CharField(max_length=60)),
                ('query', models.CharField(help_text="What follows the question mark in the list's address.", max_length=500)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('membership', 'listing', 'name'), name='saved_view_name_once'),
                ],
            },
        ),
    ]
