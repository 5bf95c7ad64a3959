"""Row-level security and grants of every table, written after each migration from attributes of the models.

A model declares `tenant_condition` (SQL; without it the table has no tenant and needs a `tenancy_reason`),
`is_append_only`, and, if the web role may do less or more than usual, `app_access` ("none", "add", "read", "write"). A
secret has a separate table, so that roles without access to it can still read whole rows of everything else.
`app_kept_columns` are columns that the web role cannot change and that are false or null in a new row. Grants on all
other columns would have the same effect, but Django writes all columns of a row that it saves.
"""

from collections.abc import Iterator

from django.apps import apps as django_apps
from django.conf import settings
from django.db import connection, models, transaction

APP_ROLE = "anneal_app"
SYSTEM_ROLE = "anneal_sys"
OWNER_ROLE = "anneal_owner"
ROLES = (APP_ROLE, SYSTEM_ROLE, "anneal_internal", "anneal_gateway")
OWN_ORGANIZATION = "organization_id = nullif(current_setting('anneal.organization', true), '')"


# Usage arrives by COPY into a temporary table of the gateway's connection.
_GRANT_TEMPORARY = """
    DO $$ BEGIN EXECUTE format('GRANT TEMPORARY ON DATABASE %I TO anneal_gateway', current_database()); END $$
"""


_KEEP_COLUMNS = f"""
    CREATE OR REPLACE FUNCTION anneal_keep_columns() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
    DECLARE
        kept text;
        before jsonb := CASE WHEN TG_OP = 'UPDATE' THEN to_jsonb(OLD) ELSE '{{}}'::jsonb END;
    BEGIN
        IF current_user = '{APP_ROLE}' THEN
            FOREACH kept IN ARRAY TG_ARGV LOOP
                IF coalesce(nullif(to_jsonb(NEW) -> kept, 'null'::jsonb), 'false'::jsonb)
                    IS DISTINCT FROM coalesce(nullif(before -> kept, 'null'::jsonb), 'false'::jsonb)
                THEN
                    RAISE insufficient_privilege
                      USING MESSAGE = format('%I may not set %I.%I', current_user, TG_TABLE_NAME, kept);
                END IF;
            END LOOP;
        END IF;
        RETURN NEW;
    END $$
"""


class UnsafeDatabaseRole(Exception):
    """The process is connected under a role that bypasses row-level security."""


def refuse_unsafe_role() -> None:
    """Raise UnsafeDatabaseRole if this connection bypasses row-level security."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT rolname FROM pg_roles WHERE rolname = session_user AND (rolsuper OR rolbypassrls)")
        row = cursor.fetchone()
    if row:
        raise UnsafeDatabaseRole(
            f"role {row[0]!r} ignores row-level security: use anneal_app (deploy/postgres/roles.sql)"
        )


def write_policies_after_migrate(**said: object) -> None:
    """Call `write_policies` after `migrate`. `flush` sends the same signal without a plan and changes no table."""
    if "plan" in said:
        write_policies()


def write_policies() -> None:
    """Enable and force row-level security and write grants on every table. Idempotent; runs after each migrate.

    Each table has a separate transaction, which locks it before the first statement. A GRANT changes the table's row of
    pg_class without locking the table. An autovacuum of the table then waits for that row while it holds the lock that
    ALTER TABLE needs.
    """
    with connection.cursor() as cursor:
        cursor.execute(f"GRANT USAGE ON SCHEMA public TO {', '.join(ROLES)}")
        cursor.execute(_GRANT_TEMPORARY)
        cursor.execute(_KEEP_COLUMNS)
        for model in django_apps.get_models():
            if model._meta.managed and not model._meta.proxy:
                with transaction.atomic():
                    cursor.execute(";\n".join(_statements(model)))
        cursor.execute(f"GRANT SELECT ON django_migrations TO {', '.join(ROLES)}")


def _statements(model: type[models.Model]) -> Iterator[str]:
    table = connection.ops.quote_name(model._meta.db_table)
    yield f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"
    yield f"REVOKE ALL ON {table} FROM {', '.join(ROLES)}"
    for role in ROLES:
        if privileges := _privileges(role, model):
            yield f"GRANT {privileges} ON {table} TO {role}"
    yield from _keep_columns(model)
    condition = visibility(model)
    yield f"ALTER TABLE {table} {'ENABLE' if condition else 'DISABLE'} ROW LEVEL SECURITY"
    yield f"ALTER TABLE {table} {'FORCE' if condition else 'NO FORCE'} ROW LEVEL SECURITY"
    yield f"DROP POLICY IF EXISTS tenant ON {table}"
    yield f"DROP POLICY IF EXISTS everything ON {table}"
    if condition:
        yield f"CREATE POLICY tenant ON {table} TO {APP_ROLE} USING ({condition}) WITH CHECK ({condition})"
        others = ", ".join([OWNER_ROLE, *(role for role in ROLES if role != APP_ROLE)])
        yield f"CREATE POLICY everything ON {table} TO {others} USING (true) WITH CHECK (true)"


def _keep_columns(model: type[models.Model]) -> Iterator[str]:
    table = connection.ops.quote_name(model._meta.db_table)
    yield f"DROP TRIGGER IF EXISTS app_keeps_columns ON {table}"
    if columns := getattr(model, "app_kept_columns", ()):
        names = ", ".join(f"'{column}'" for column in columns)
        yield (
            f"CREATE TRIGGER app_keeps_columns BEFORE INSERT OR UPDATE ON {table}"
            f" FOR EACH ROW EXECUTE FUNCTION anneal_keep_columns({names})"
        )


def visibility(model: type[models.Model]) -> str | None:
    """Return the SQL condition under which `anneal_app` sees a row; None for tables without a tenant."""
    return getattr(model, "tenant_condition", None)


def _privileges(role: str, model: type[models.Model]) -> str:
    writes = "SELECT, INSERT" if getattr(model, "is_append_only", False) else "SELECT, INSERT, UPDATE, DELETE"
    label, app = model._meta.label_lower, model._meta.app_label
    if role == SYSTEM_ROLE:
        return writes
    if role == APP_ROLE:
        access = getattr(
            model, "app_access", "write" if visibility(model) else settings.APP_ROLE_GRANTS.get(label, "read")
        )
    else:
        grants = settings.ROLE_GRANTS[role]
        access = grants.get(label, grants.get(app, "none"))
    words = {"none": "", "add": "INSERT", "read": "SELECT", "extend": "SELECT, INSERT", "write": writes}
    return words.get(access, access)  # a role that may see only some columns has its privileges written out
