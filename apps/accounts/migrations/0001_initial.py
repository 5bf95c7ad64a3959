"""People, organizations, their members, projects, keys and regions, notifications and webhooks."""

import apps.core.ids
import django.contrib.postgres.fields
import django.db.models.deletion
import django.db.models.functions.datetime
import django.db.models.functions.text
import pgtrigger.compiler
from apps.core.database.initial_migration import InitialMigration
from django.conf import settings
from django.db import migrations, models

# The only lookup across tenants: it maps the HMAC of a presented key to the identity behind the key. Of a private
# project, a key works as long as its creator sees the project, and it does no more than its creator may do there.
FIND_API_KEY = """
CREATE FUNCTION find_api_key(presented text)
RETURNS TABLE (
    key_id text, organization_id text, organization_slug text, scopes text[], created_by_id text, role text, kind text,
    expires_at timestamptz, last_used_at timestamptz, project_id text
)
LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT key.id, key.organization_id, organization.slug, key.scopes::text[], key.created_by_id,
           CASE WHEN member.role = 'viewer' AND membership.role <> 'owner' THEN 'viewer' ELSE membership.role END,
           key.kind, key.expires_at, key.last_used_at, key.project_id
      FROM public.accounts_apikey AS key
      JOIN public.accounts_organization AS organization ON organization.id = key.organization_id
      JOIN public.accounts_membership AS membership
        ON membership.organization_id = key.organization_id AND membership.user_id = key.created_by_id
      JOIN public.accounts_user AS maker ON maker.id = key.created_by_id
      JOIN public.accounts_project AS project ON project.id = key.project_id
      LEFT JOIN public.accounts_projectmember AS member
        ON member.project_id = key.project_id AND member.membership_id = membership.id
     WHERE key.hmac = presented
       AND key.revoked_at IS NULL
       AND (key.expires_at IS NULL OR key.expires_at > clock_timestamp())
       AND organization.suspended_at IS NULL
       AND maker.is_active
       AND (NOT project.is_private OR member.id IS NOT NULL OR membership.role = 'owner')
$$;
REVOKE ALL ON FUNCTION find_api_key(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION find_api_key(text) TO anneal_app, anneal_sys, anneal_gateway;
"""


class Migration(InitialMigration):
    dependencies = []

    operations = [
        migrations.CreateModel(
            name='User',
            fields=[
                ('password', models.CharField(max_length=128, verbose_name='password')),
                ('last_login', models.DateTimeField(blank=True, null=True, verbose_name='last login')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='user', primary_key=True, separator='_', serialize=False)),
                ('email', models.EmailField(max_length=254, unique=True)),
                ('name', models.CharField(blank=True, max_length=120)),
                ('is_active', models.BooleanField(default=True)),
                ('is_operator', models.BooleanField(default=False, help_text='May open the operator console of this installation.')),
                ('wants_job_mail', models.BooleanField(db_default=True, default=True, help_text='Mail when a job of theirs ends.')),
                ('wants_balance_mail', models.BooleanField(db_default=True, default=True, help_text='Mail when a balance is low.')),
                ('wants_budget_mail', models.BooleanField(db_default=True, default=True, help_text='Mail when a budget is reached.')),
                ('wants_invoice_mail', models.BooleanField(db_default=True, default=True, help_text='Mail when an invoice is issued.')),
                ('time_zone', models.CharField(blank=True, db_default='', help_text="IANA name; empty: the zone of the person's browser.", max_length=64)),
                ('language', models.CharField(blank=True, db_default='', help_text='Of pages and mails; empty: of the browser, and English mails.', max_length=8)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('service_account_of', models.ForeignKey(help_text='The organization whose programs act in this name. It cannot sign in. Null: a person.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(django.db.models.functions.text.Lower('email'), name='user_email_case_insensitive'),
                    models.CheckConstraint(condition=models.Q(('service_account_of', None), ('is_operator', False), _connector='OR'), name='service_account_is_no_operator'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='user_key_news',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OF "is_active"',
                            table='accounts_user',
                            when='AFTER',
                            func="PERFORM pg_notify('anneal_keys', ''); RETURN NULL;",
                            hash='3ba55958a07c003301cdc3e96787420f84ab6204',
                            pgid='pgtrigger_user_key_news_6d9ff',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='Organization',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='org', primary_key=True, separator='_', serialize=False)),
                ('name', models.CharField(max_length=80)),
                ('slug', models.SlugField(help_text='Part of the names of its fine-tuned models.', max_length=40, unique=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('suspended_at', models.DateTimeField(null=True)),
                ('founded_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('has_own_share', models.BooleanField(db_default=False, help_text='It has paid, or an operator has set its limits. Until then it has one share of queues and limits together with the others its founder made.')),
                ('requires_second_factor', models.BooleanField(default=False, help_text='Its pages open only for members who have shown a second factor.')),
                ('regions', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=40), help_text='Names of the regions that its data may be in, set by an operator; null: any.', null=True, size=None)),
            ],
            options={
                'indexes': [
                    models.Index(condition=models.Q(('regions__isnull', False)), fields=['id'], name='organization_limited'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(('regions', None), ('regions__len__gt', 0), _connector='OR'), name='organization_has_a_region'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='organization_key_news',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OF "suspended_at"',
                            table='accounts_organization',
                            when='AFTER',
                            func="PERFORM pg_notify('anneal_keys', NEW.id); RETURN NULL;",
                            hash='c48f143b5898beb1307d54ae7e225d67d30672d9',
                            pgid='pgtrigger_organization_key_news_62d19',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='Membership',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='mem', primary_key=True, separator='_', serialize=False)),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='memberships', to=settings.AUTH_USER_MODEL)),
                ('role', models.CharField(choices=[('viewer', 'viewer'), ('member', 'member'), ('admin', 'admin'), ('owner', 'owner')], max_length=16)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'user'), name='membership_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='membership_key_news',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='accounts_membership',
                            when='AFTER',
                            func="PERFORM pg_notify('anneal_keys', OLD.organization_id); RETURN NULL;",
                            hash='c8911fb2ebd072c08b0b72d3bfb247cd56ca05f3',
                            pgid='pgtrigger_membership_key_news_e5e8c',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='Invitation',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='inv', primary_key=True, separator='_', serialize=False)),
                ('email', models.EmailField(max_length=254)),
                ('role', models.CharField(choices=[('viewer', 'viewer'), ('member', 'member'), ('admin', 'admin'), ('owner', 'owner')], max_length=16)),
                ('token_sha256', models.CharField(max_length=64, unique=True)),
                ('invited_by', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('expires_at', models.DateTimeField()),
                ('accepted_at', models.DateTimeField(null=True)),
                ('accepted_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('revoked_at', models.DateTimeField(null=True)),
                ('only_for_address', models.BooleanField(default=False, help_text='Only an account that has verified this address may accept it.')),
                ('made_with', models.CharField(blank=True, db_default='', help_text='The API key that sent it, with which it is revoked.', max_length=64)),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(models.F('organization'), django.db.models.functions.text.Lower('email'), condition=models.Q(('accepted_at', None), ('revoked_at', None)), name='invitation_open_once'),
                    models.CheckConstraint(condition=models.Q(models.Q(('accepted_at', None), ('accepted_by', None)), models.Q(('accepted_at__isnull', False), ('accepted_by__isnull', False)), _connector='OR'), name='invitation_accepted_pair'),
                ],
            },
        ),
        migrations.CreateModel(
            name='ApiKey',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='key', primary_key=True, separator='_', serialize=False)),
                ('kind', models.CharField(choices=[('secret', 'API key'), ('member', "short-lived token of a member's browser")], default='secret', max_length=8)),
                ('name', models.CharField(max_length=80)),
                ('prefix', models.CharField(help_text='First characters, to recognise the key by.', max_length=20)),
                ('hmac', models.CharField(max_length=64, unique=True)),
                ('scopes', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=32), size=None)),
                ('created_by', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('issued_by', models.ForeignKey(help_text="Of a service account's key: who created it, and so knows it.", null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('expires_at', models.DateTimeField(null=True)),
                ('last_used_at', models.DateTimeField(null=True)),
                ('revoked_at', models.DateTimeField(null=True)),
                ('revoked_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('requests_per_minute', models.PositiveIntegerField(help_text='Of this key alone; null: no limit of its own.', null=True)),
                ('tokens_per_minute', models.PositiveIntegerField(null=True)),
                ('concurrent_requests', models.PositiveIntegerField(null=True)),
                ('made_with', models.CharField(blank=True, db_default='', help_text='The key that made this one, and is revoked with it.', max_length=64)),
                ('first_key', models.CharField(blank=True, db_default='', help_text='Of a rotated key: the first, whose budget it shares.', max_length=64)),
                ('project', models.ForeignKey(help_text='Of all that is created with it.', on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project')),
                ('spend_limit_nano', models.BigIntegerField(help_text='Of its whole life; null: no limit of its own.', null=True)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['made_with'], name='accounts_ap_made_wi_d2a7c6_idx'),
                    models.Index(fields=['first_key'], name='accounts_ap_first_k_4a3ff1_idx'),
                ],
                'constraints': [
                    models.CheckConstraint(condition=models.Q(models.Q(('revoked_at', None), ('revoked_by', None)), models.Q(('revoked_at__isnull', False), ('revoked_by__isnull', False)), _connector='OR'), name='api_key_revoked_pair'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='api_key_news',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OF "revoked_at", "expires_at", "scopes", "requests_per_minute", "tokens_per_minute", "concurrent_requests"',
                            table='accounts_apikey',
                            when='AFTER',
                            func="PERFORM pg_notify('anneal_keys', NEW.organization_id); RETURN NULL;",
                            hash='69c8b8c50c3484da0c444e1bfb6eae98384ee31e',
                            pgid='pgtrigger_api_key_news_c9f91',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='Notification',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='note', primary_key=True, separator='_', serialize=False)),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('kind', models.CharField(choices=[('job', 'Fine-tune'), ('balance', 'Low balance'), ('budget', 'Budget'), ('invoice', 'Invoice'), ('credit', 'Credit'), ('member', 'Member'), ('webhook', 'Webhook')], max_length=8)),
                ('title', models.CharField(max_length=200)),
                ('path', models.CharField(help_text='The page about it.', max_length=200)),
                ('key', models.CharField(help_text='Of the event: an event that is repeated is one notification.', max_length=200)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('read_at', models.DateTimeField(null=True)),
            ],
            options={
                'indexes': [
                    models.Index(fields=['organization', 'user', '-id'], name='notification_newest'),
                    models.Index(condition=models.Q(('read_at', None)), fields=['user', 'organization'], name='notification_unread'),
                    models.Index(fields=['created_at'], name='notification_age'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'user', 'key'), name='notification_once'),
                ],
            },
        ),
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
        migrations.CreateModel(
            name='OrganizationEvent',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='evt', primary_key=True, separator='_', serialize=False)),
                ('type', models.CharField(help_text='Such as fine_tuning.job.succeeded.', max_length=64)),
                ('subject', models.CharField(help_text='The id of the object that it is about.', max_length=64)),
                ('data', models.JSONField(default=dict, help_text="What programs learn beside the subject's id.")),
                ('title', models.CharField(max_length=200)),
                ('path', models.CharField(help_text='The page about it.', max_length=200)),
                ('key', models.CharField(help_text='An event that is repeated with its key is the same event.', max_length=200)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(fields=['created_at'], name='event_age'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'key'), name='event_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='WebhookEndpoint',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=29, prefix='we', primary_key=True, separator='_', serialize=False)),
                ('url', models.CharField(max_length=400)),
                ('event_types', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=64), size=None)),
                ('format', models.CharField(choices=[('standard', 'Standard Webhooks'), ('slack', 'Slack')], max_length=8)),
                ('secret_sealed', models.BinaryField()),
                ('previous_sealed', models.BinaryField(help_text='Signs as well until previous_until.', null=True)),
                ('previous_until', models.DateTimeField(null=True)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('paused_at', models.DateTimeField(null=True)),
                ('disabled_because', models.CharField(blank=True, db_default='', max_length=200)),
                ('failing_since', models.DateTimeField(null=True)),
                ('name', models.CharField(blank=True, db_default='', default='', max_length=100)),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), help_text='When its settings or its secret changed last.')),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='WebhookDelivery',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='whd', primary_key=True, separator='_', serialize=False)),
                ('endpoint', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='deliveries', to='accounts.webhookendpoint')),
                ('event', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.organizationevent')),
                ('status', models.CharField(choices=[('pending', 'Pending'), ('delivered', 'Delivered'), ('failed', 'Failed')], default='pending', max_length=10)),
                ('attempts', models.PositiveSmallIntegerField(default=0)),
                ('attempts_left', models.PositiveSmallIntegerField()),
                ('response_code', models.PositiveSmallIntegerField(null=True)),
                ('response_text', models.CharField(blank=True, max_length=500)),
                ('error', models.CharField(blank=True, max_length=200)),
                ('duration_ms', models.PositiveIntegerField(null=True)),
                ('attempted_at', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [
                    models.Index(fields=['endpoint', '-id'], name='webhook_delivery_newest'),
                    models.Index(fields=['created_at'], name='webhook_delivery_age'),
                    models.Index(condition=models.Q(('status', 'pending')), fields=['endpoint'], name='webhook_delivery_pending'),
                ],
                'constraints': [
                    models.UniqueConstraint(fields=('endpoint', 'event'), name='webhook_delivery_once'),
                ],
            },
        ),
        migrations.CreateModel(
            name='Project',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='proj', primary_key=True, separator='_', serialize=False)),
                ('name', models.CharField(max_length=80)),
                ('is_private', models.BooleanField(db_default=False, help_text='Only its members and the owners see what is in it.')),
                ('default_model', models.CharField(blank=True, db_default='', help_text='The base model of a new job that names none.', max_length=200)),
                ('default_pool', models.CharField(blank=True, db_default='', help_text='Its pool, if it can run it.', max_length=64)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('archived_at', models.DateTimeField(null=True)),
                ('default_method', models.CharField(blank=True, db_default='', help_text='Its method, if the model has it.', max_length=8)),
                ('default_suffix', models.CharField(blank=True, db_default='', help_text='Its suffix.', max_length=64)),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(models.F('organization'), django.db.models.functions.text.Lower('name'), condition=models.Q(('archived_at', None)), name='project_name_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='project_key_news',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OF "is_private"',
                            table='accounts_project',
                            when='AFTER',
                            func="PERFORM pg_notify('anneal_keys', NEW.organization_id); RETURN NULL;",
                            hash='07d348e3df4e43bf431b0e0bbb9e1684b4c0bb08',
                            pgid='pgtrigger_project_key_news_27f73',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='ProjectMember',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='projm', primary_key=True, separator='_', serialize=False)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='members', to='accounts.project')),
                ('membership', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.membership')),
                ('role', models.CharField(choices=[('member', 'member'), ('viewer', 'viewer'), ('admin', 'admin')], max_length=8)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('project', 'membership'), name='project_member_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='project_member_key_news',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='accounts_projectmember',
                            when='AFTER',
                            func="PERFORM pg_notify('anneal_keys', OLD.organization_id); RETURN NULL;",
                            hash='aab01972d9d493b387f1ef8f67b329c5b7edfa9b',
                            pgid='pgtrigger_project_member_key_news_9cfdb',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='Region',
            fields=[
                ('name', models.CharField(max_length=40, primary_key=True, serialize=False)),
                ('is_home', models.BooleanField(default=False, help_text='Of one: the object store, the database and the gateways are there.')),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(condition=models.Q(('is_home', True)), fields=('is_home',), name='region_home_once'),
                ],
            },
        ),
        migrations.RunSQL(FIND_API_KEY, reverse_sql="DROP FUNCTION find_api_key(text)"),
        migrations.RunSQL("INSERT INTO accounts_region (name, is_home) VALUES ('local', true)", migrations.RunSQL.noop),
    ]
