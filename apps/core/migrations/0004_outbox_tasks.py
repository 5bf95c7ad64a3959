"""Move waiting messages to the new lanes of their topics."""

from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ('core', '0003_outbox_lanes'),
    ]

    operations = [
        migrations.RunSQL(
            """
            UPDATE core_outboxmessage SET lane = 'payments'
            WHERE sent_at IS NULL AND topic LIKE 'payments.%' AND topic <> 'payments.suspended';
            UPDATE core_outboxmessage SET lane = 'hub' WHERE sent_at IS NULL AND topic = 'base_model.install'
            """,
            migrations.RunSQL.noop,
        ),
    ]
