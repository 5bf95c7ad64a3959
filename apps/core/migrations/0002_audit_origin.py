"""Origin of audited requests, and indexes for reading the log."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('core', '0001_initial')]

    operations = [
        migrations.AddField(
            model_name='auditentry',
            name='ip',
            field=models.GenericIPAddressField(help_text='Where the request came from; null outside of a request.', null=True),
        ),
        migrations.AddField(
            model_name='auditentry',
            name='user_agent',
            field=models.CharField(blank=True, db_default='', max_length=200),
        ),
        migrations.AddIndex(
            model_name='auditentry',
            index=models.Index(fields=['organization', 'actor', '-id'], name='audit_by_actor'),
        ),
        migrations.AddIndex(
            model_name='auditentry',
            index=models.Index(fields=['organization', 'target', '-id'], name='audit_by_target'),
        ),
    ]
