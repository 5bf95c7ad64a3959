"""The outbox and the audit log."""

import django.db.models.deletion
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
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', '-id'], name='audit_by_organization'),
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
                ('attempts', models.PositiveSmallIntegerField(default=0)),
                ('next_attempt_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('sent_at', models.DateTimeField(null=True)),
                ('last_error', models.CharField(blank=True, max_length=500)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('sent_at', None)), fields=['next_attempt_at'], name='outbox_due'),
                ],
            },
        ),
    ]
