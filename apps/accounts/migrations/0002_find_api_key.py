"""The one door between tenants: from the HMAC of a presented key to the identity it stands for."""

from django.db import migrations

CREATE = """
CREATE FUNCTION find_api_key(presented text)
RETURNS TABLE (
    key_id text, organization_id text, organization_slug text, scopes text[], created_by_id text, role text, kind text,
    expires_at timestamptz, last_used_at timestamptz
)
LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
AS $$
    SELECT key.id, key.organization_id, organization.slug, key.scopes::text[], key.created_by_id, membership.role,
           key.kind, key.expires_at, key.last_used_at
      FROM public.accounts_apikey AS key
      JOIN public.accounts_organization AS organization ON organization.id = key.organization_id
      JOIN public.accounts_membership AS membership
        ON membership.organization_id = key.organization_id AND membership.user_id = key.created_by_id
      JOIN public.accounts_user AS maker ON maker.id = key.created_by_id
     WHERE key.hmac = presented
       AND key.revoked_at IS NULL
       AND (key.expires_at IS NULL OR key.expires_at > clock_timestamp())
       AND organization.suspended_at IS NULL
       AND maker.is_active
$$;
REVOKE ALL ON FUNCTION find_api_key(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION find_api_key(text) TO anneal_app, anneal_sys, anneal_gateway;
"""


class Migration(migrations.Migration):
    dependencies = [("accounts", "0001_initial")]

    operations = [migrations.RunSQL(CREATE, reverse_sql="DROP FUNCTION find_api_key(text)")]
