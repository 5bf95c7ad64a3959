"""The outbox, the audit log, and the answers to repeated requests."""

import django.db.models.deletion
import django.db.models.functions.comparison
import django.db.models.functions.datetime
import pgtrigger.compiler
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='AuditEntry',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('organization', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('actor', models.CharField(max_length=64)),
                ('action', models.CharField(max_length=64)),
                ('target', models.CharField(max_length=128)),
                ('details', models.JSONField(default=dict)),
                ('ip', models.GenericIPAddressField(help_text='Where the request came from; null outside of a request.', null=True)),
                ('user_agent', models.CharField(blank=True, db_default='', max_length=200)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', '-id'], name='audit_by_organization'),
                    models.Index(fields=['organization', 'actor', '-id'], name='audit_by_actor'),
                    models.Index(fields=['organization', 'target', '-id'], name='audit_by_target'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='core_auditentry',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='6b2652b5bb5129424469034ae53d5116f56d3e42',
                            pgid='pgtrigger_append_only_97da0',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='OutboxMessage',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('topic', models.CharField(max_length=64)),
                ('key', models.CharField(max_length=200, unique=True)),
                ('payload', models.JSONField(default=dict)),
                ('lane', models.CharField(default='control', help_text='Whose worker carries it out.', max_length=16)),
                ('is_urgent', models.BooleanField(default=False, help_text='Goes before the others of its lane.')),
                ('share', models.CharField(db_default=django.db.models.functions.comparison.Coalesce(models.Func(models.Value('anneal.organization'), models.Value(True), function='current_setting'), models.Value(''), output_field=models.CharField()), help_text='The organization whose turn it waits for, if any.', max_length=64)),
                ('attempts', models.PositiveSmallIntegerField(default=0)),
                ('next_attempt_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('taken_at', models.DateTimeField(help_text='When it was last tried.', null=True)),
                ('sent_at', models.DateTimeField(null=True)),
                ('last_error', models.CharField(blank=True, max_length=500)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('traceparent', models.CharField(blank=True, db_default='', help_text='The trace that it continues.', max_length=55)),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('sent_at', None)), fields=['lane', 'next_attempt_at'], name='outbox_due'),
                    models.Index(fields=['lane', 'share', '-taken_at'], name='outbox_served'),
                ],
            },
        ),
        migrations.CreateModel(
            name='IdempotentAnswer',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', models.CharField(help_text='SHA-256 of organization, API key and header.', max_length=64, primary_key=True, serialize=False)),
                ('request_sha256', models.CharField(help_text='Of method, address and body.', max_length=64)),
                ('answer_sealed', models.BinaryField(help_text='The JSON; it may hold a secret that is shown once.')),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(fields=['created_at'], name='idempotent_answer_age'),
                ],
            },
        ),
    ]
