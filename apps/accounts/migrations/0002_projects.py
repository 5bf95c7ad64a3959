"""Projects inside organizations. Each organization gets its default project, and each API key is in it."""

import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
import django.db.models.functions.text
import pgtrigger.compiler
import pgtrigger.migrations
from django.db import migrations, models

# The id of a default project is that of its organization, as a project.
ADD_DEFAULT_PROJECTS = """
    INSERT INTO accounts_project (id, organization_id, name, created_by, created_at)
    SELECT replace(id, 'org_', 'proj_'), id, 'Default project', 'system', created_at FROM accounts_organization
"""
MOVE_KEYS = "UPDATE accounts_apikey SET project_id = replace(organization_id, 'org_', 'proj_')"

# As 0001 has it, with the project of the key. Of a private project, a key works as long as its maker sees the project,
# and it does no more than its maker may do there.
FIND_API_KEY = """
DROP FUNCTION find_api_key(text);
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


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Project',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=31, prefix='proj', primary_key=True, separator='_', serialize=False)),
                ('name', models.CharField(max_length=80)),
                ('is_private', models.BooleanField(db_default=False, help_text='Only its members and the owners see what is in it.')),
                ('default_model', models.CharField(blank=True, db_default='', help_text='The base model that the wizard offers first.', max_length=200)),
                ('default_pool', models.CharField(blank=True, db_default='', help_text='The pool, likewise.', max_length=64)),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('archived_at', models.DateTimeField(null=True)),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(models.F('organization'), django.db.models.functions.text.Lower('name'), condition=models.Q(('archived_at', None)), name='project_name_once'),
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
                ('role', models.CharField(choices=[('member', 'member'), ('viewer', 'viewer')], max_length=8)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('project', 'membership'), name='project_member_once'),
                ],
            },
        ),
        migrations.AddField(
            model_name='apikey',
            name='project',
            field=models.ForeignKey(help_text='Of all that is created with it.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project'),
        ),
        migrations.RunSQL(
            [ADD_DEFAULT_PROJECTS, MOVE_KEYS, "SET CONSTRAINTS ALL IMMEDIATE", "SET CONSTRAINTS ALL DEFERRED"],
            migrations.RunSQL.noop,
        ),
        migrations.AlterField(
            model_name='apikey',
            name='project',
            field=models.ForeignKey(help_text='Of all that is created with it.', on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.project'),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='project',
            trigger=pgtrigger.compiler.Trigger(name='project_key_news', sql=pgtrigger.compiler.UpsertTriggerSql(func="PERFORM pg_notify('anneal_keys', NEW.organization_id); RETURN NULL;", hash='07d348e3df4e43bf431b0e0bbb9e1684b4c0bb08', operation='UPDATE OF "is_private"', pgid='pgtrigger_project_key_news_27f73', table='accounts_project', when='AFTER')),
        ),
        pgtrigger.migrations.AddTrigger(
            model_name='projectmember',
            trigger=pgtrigger.compiler.Trigger(name='project_member_key_news', sql=pgtrigger.compiler.UpsertTriggerSql(func="PERFORM pg_notify('anneal_keys', OLD.organization_id); RETURN NULL;", hash='aab01972d9d493b387f1ef8f67b329c5b7edfa9b', operation='UPDATE OR DELETE', pgid='pgtrigger_project_member_key_news_9cfdb', table='accounts_projectmember', when='AFTER')),
        ),
        migrations.RunSQL(FIND_API_KEY, migrations.RunSQL.noop),
    ]
