"""Every table has a tenant or a reason, and PostgreSQL itself keeps tenants apart."""

import os
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from django.apps import apps
from django.db import ProgrammingError, connection, models, transaction
from psycopg import sql

from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.models import ApiKey, Membership, Organization, User
from apps.accounts.queries import find_key, list_keys, list_members
from apps.core.database.policies import APP_ROLE, OWNER_ROLE, ROLES, visibility
from apps.core.database.tenancy import system, tenant
from apps.core.models import AuditEntry, OutboxMessage
from apps.core.secrets.resealing import sealed_columns
from tests.factories.accounts import make_key
from tests.guards.makers.tenants import tenant_models
from tests.guards.world import build_world

# Tables of other packages: label -> why it needs no tenant.
OTHER_PACKAGES = {
    "account.EmailAddress": "belongs to a person; allauth reads it before anybody is signed in",
    "account.EmailConfirmation": "belongs to a person; unused, confirmations are signed links",
    "auth.Group": "unused; roles are classes",
    "auth.Permission": "unused; roles are classes",
    "mfa.Authenticator": "belongs to a person; allauth reads it before the sign-in is complete",
    "contenttypes.ContentType": "names of tables",
    "sessions.Session": "belongs to a browser; the key is the secret",
    "usersessions.UserSession": "belongs to a person; written while the sign-in is not complete",
}
MODELS = sorted(apps.get_models(), key=lambda model: model._meta.label)
OURS = [model for model in MODELS if model.__module__.startswith("apps.")]
TENANT_TABLES = [model for model in OURS if visibility(model)]
APPEND_ONLY = [model for model in OURS if getattr(model, "is_append_only", False)]


def label(model: type[models.Model]) -> str:
    return model._meta.label


def query(statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, arguments)
        return cursor.fetchall()


# --- every table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", OURS, ids=label)
def test_a_model_has_a_tenant_or_a_reason(model: type[models.Model]) -> None:
    has_organization = any(field.name == "organization" for field in model._meta.fields)

    assert visibility(model) or getattr(model, "tenancy_reason", "")
    assert visibility(model) or not has_organization, "a row with an organization is visible to that one only"


def test_other_packages_tables_are_listed_with_a_reason() -> None:
    found = {label(model) for model in MODELS} - {label(model) for model in OURS}

    assert found == set(OTHER_PACKAGES)


@pytest.mark.django_db
def test_row_level_security_is_enabled_and_forced_on_every_tenants_table() -> None:
    secured = dict(
        query(
            "SELECT relname, relrowsecurity AND relforcerowsecurity FROM pg_class"
            " WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
        )
    )

    assert {name for name, is_secured in secured.items() if is_secured} == {m._meta.db_table for m in TENANT_TABLES}
    assert set(secured) == {table for model in MODELS for table in (model._meta.db_table, *_many_to_many(model))} | {
        "django_migrations"
    }


def _many_to_many(model: type[models.Model]) -> list[str]:
    return [field.m2m_db_table() for field in model._meta.local_many_to_many]


@pytest.mark.django_db
def test_every_tenants_table_has_its_two_policies() -> None:
    found = query("SELECT tablename, policyname, roles::text[], qual = with_check FROM pg_policies")

    others = {OWNER_ROLE, *ROLES} - {APP_ROLE}
    expected = {(m._meta.db_table, "tenant", frozenset({APP_ROLE}), True) for m in TENANT_TABLES} | {
        (m._meta.db_table, "everything", frozenset(others), True) for m in TENANT_TABLES
    }
    assert {(table, policy, frozenset(roles), same) for table, policy, roles, same in found} == expected


@pytest.mark.django_db
def test_no_role_of_a_process_stands_above_the_policies() -> None:
    names = [OWNER_ROLE, *ROLES]

    assert query("SELECT count(*) FROM pg_roles WHERE rolname = ANY(%s)", names) == [(len(names),)]
    assert query("SELECT rolname FROM pg_roles WHERE rolname = ANY(%s) AND (rolsuper OR rolbypassrls)", names) == []
    assert query("SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tableowner <> %s", OWNER_ROLE) == []


@pytest.mark.django_db
@pytest.mark.parametrize("model", TENANT_TABLES, ids=label)
def test_a_row_of_another_tenant_cannot_be_written(
    model: type[models.Model], organization: Organization, rival: Organization
) -> None:
    """The policy is asked before any other constraint, so an otherwise empty row tells."""
    column = "id" if model is Organization else "organization_id"
    statement = sql.SQL("INSERT INTO {} ({}) VALUES (%s)").format(
        sql.Identifier(model._meta.db_table), sql.Identifier(column)
    )

    other = rival.pk if column == "organization_id" else "org_other"
    denied = pytest.raises(ProgrammingError, match=r"row-level security|permission denied")  # may write none at all
    with denied, tenant(organization=organization), connection.cursor() as cursor:
        cursor.execute(statement, [other])


# --- each wall alone --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.django_db
def test_row_level_security_alone_keeps_tenants_apart() -> None:
    """Unscoped queries over every table, with rows of both tenants in most."""
    world = build_world()
    seen_of = {}

    for name, here in (("acme", world.acme), ("rival", world.rival)):
        with tenant(organization=here.organization):
            seen_of[name] = {
                label(model): {row.organization_id for row in model._base_manager.all()} for model in tenant_models()
            }
        assert {owner for owners in seen_of[name].values() for owner in owners} <= {here.organization.pk, None}

    filled = {name for name, owners in seen_of["acme"].items() if owners}
    assert filled >= {
        "accounts.ApiKey",
        "datasets.DatasetVersion",
        "finetuning.FineTuningJob",
        "adapters.AdapterVersion",
    }


@pytest.mark.slow
@pytest.mark.django_db
def test_without_a_tenant_nothing_is_visible() -> None:
    build_world()

    with tenant():
        seen = {label(model): model._base_manager.exclude(organization=None).count() for model in tenant_models()}
        organizations = Organization.objects.count()

    assert set(seen.values()) == {0}
    assert organizations == 0


@pytest.mark.django_db
def test_a_person_sees_their_own_memberships_and_organizations_only(
    alice: User, organization: Organization, rival: Organization
) -> None:
    with tenant(user=alice):
        assert list(Membership.objects.values_list("user_id", flat=True)) == [alice.pk]
        assert list(Organization.objects.all()) == [organization]
        assert not ApiKey.objects.exists()


@pytest.mark.django_db
def test_scoping_alone_keeps_tenants_apart(
    key: IssuedKey, organization: Organization, rival: Organization, charlie: User
) -> None:
    """As the owner of the tables, who sees all rows. The URL guard does the same over every address."""
    foreign = make_key(rival, charlie)

    assert ApiKey.objects.count() == 2
    assert foreign.key not in list_keys(organization=organization)
    assert charlie.pk not in {member.user_id for member in list_members(organization=organization)}


@pytest.mark.django_db
def test_an_update_cannot_reach_or_move_a_row_across(
    key: IssuedKey, organization: Organization, rival: Organization
) -> None:
    with tenant(organization=rival):
        assert ApiKey.objects.filter(pk=key.key.pk).update(name="taken") == 0

    with pytest.raises(ProgrammingError, match="row-level security"), tenant(organization=organization):
        ApiKey.objects.filter(pk=key.key.pk).update(organization=rival)


# --- the doors between tenants ----------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_key_is_found_from_inside_any_tenant(key: IssuedKey, rival: Organization) -> None:
    with tenant(organization=rival):
        identity = find_key(secret=key.secret)

    assert identity is not None
    assert identity.organization_id == key.key.organization_id


@pytest.mark.django_db
@pytest.mark.parametrize(("role", "may"), [("anneal_app", True), ("anneal_gateway", True), ("anneal_sys", True),
                                           ("anneal_internal", False)])  # fmt: skip
def test_only_who_serves_keys_may_look_them_up(role: str, may: bool) -> None:
    assert query("SELECT has_function_privilege(%s, 'find_api_key(text)', 'execute')", role) == [(may,)]
    assert query("SELECT proacl::text NOT LIKE '%%{=%%' FROM pg_proc WHERE proname = 'find_api_key'") == [(True,)]


@pytest.mark.django_db
def test_the_app_role_adds_to_the_outbox_and_reads_nothing_from_it(organization: Organization) -> None:
    with tenant(organization=organization):
        OutboxMessage.objects.bulk_create([OutboxMessage(topic="mail", key="k", payload={})], ignore_conflicts=True)
        with pytest.raises(ProgrammingError, match="permission denied"), transaction.atomic():
            OutboxMessage.objects.exists()


# --- append-only ------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("model", APPEND_ONLY, ids=label)
def test_an_append_only_table_refuses_changes(model: type[models.Model]) -> None:
    """By privilege for every process, and by trigger even for the owner."""
    table = model._meta.db_table
    granted = query(
        "SELECT grantee FROM information_schema.role_table_grants WHERE table_name = %s AND grantee <> %s"
        " AND privilege_type IN ('UPDATE', 'DELETE', 'TRUNCATE')",
        table,
        OWNER_ROLE,
    )
    triggers = query(
        "SELECT 1 FROM pg_trigger WHERE tgrelid = %s::regclass AND NOT tgisinternal"
        " AND tgtype & 2 <> 0 AND tgtype & 16 <> 0 AND tgenabled <> 'D'",
        table,
    )

    assert granted == []
    assert triggers


@pytest.mark.django_db
def test_the_audit_log_refuses_update_and_delete_even_by_its_owner(organization: Organization) -> None:
    entry = AuditEntry.objects.filter(organization=organization).first()
    assert entry is not None

    with pytest.raises(Exception, match="Cannot update or delete"), transaction.atomic():
        AuditEntry.objects.filter(pk=entry.pk).update(actor="nobody")
    with pytest.raises(Exception, match="Cannot update or delete"), transaction.atomic():
        entry.delete()
    with pytest.raises(ProgrammingError, match="permission denied"), system():
        AuditEntry.objects.filter(pk=entry.pk).update(actor="nobody")


# --- processes --------------------------------------------------------------------------------------------------------


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("process", ["apps.config.asgi", "apps.config.asgi_internal"])
def test_a_process_refuses_to_start_as_superuser(process: str) -> None:
    parts = urlsplit(os.environ["DATABASE_URL"])
    superuser = urlunsplit(parts._replace(netloc=f"postgres@{parts.hostname or ''}"))

    finished = run_python(f"import {process}", DATABASE_URL=superuser)

    assert finished.returncode != 0
    assert "UnsafeDatabaseRole" in finished.stderr


@pytest.mark.slow
def test_the_web_process_loads_no_engine() -> None:
    program = (
        "import django, sys; django.setup();"
        "import apps.config.urls, apps.config.celery, apps.config.asgi;"
        "heavy = {'torch', 'transformers', 'peft', 'trl', 'bitsandbytes', 'accelerate', 'vllm', 'gpu_workers'};"
        "print(sorted(heavy & set(sys.modules)))"
    )

    finished = run_python(program, DJANGO_SETTINGS_MODULE="apps.config.settings.dev")

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "[]"


MADE_OPERATORS = (
    "UPDATE accounts_user SET is_operator = true",
    "UPDATE accounts_user SET is_operator = NOT is_operator, name = 'x'",
    """INSERT INTO accounts_user (id, email, name, password, is_active, is_operator)
       VALUES ('user_x', 'x@x.example', '', '', true, true)""",
)


@pytest.mark.parametrize("statement", MADE_OPERATORS)
def test_the_web_role_cannot_make_an_operator(organization: Organization, statement: str) -> None:
    with (
        pytest.raises(ProgrammingError, match=r"may not set accounts_user\.is_operator"),
        tenant(organization=organization),
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)
    with tenant(organization=organization):
        assert User.objects.update(name="Renamed") > 0  # and changes all else
    with system():
        assert User.objects.update(is_operator=True) > 0


# Tracker keys are one tenant's own, kept apart by row-level security; web shows their last characters.
READERS_OF_SEALED = {
    "accounts.WebhookEndpoint": {"anneal_app", "anneal_sys"},  # the web replaces it, and keeps the old one a day
    "catalog.HubToken": {"anneal_sys", "anneal_internal"},
    "catalog.HubLookup": {"anneal_sys"},
    "core.IdempotentAnswer": {"anneal_app", "anneal_sys"},
    "finetuning.CapacityToken": {"anneal_sys"},
    "finetuning.HubPushToken": {"anneal_sys"},
    "finetuning.TrackerKey": {"anneal_app", "anneal_sys", "anneal_internal"},
    "serving.ReplicaToken": {"anneal_sys", "anneal_internal", "anneal_gateway"},
}


@pytest.mark.django_db
def test_a_role_reads_the_sealed_values_it_opens_and_no_other() -> None:
    """Each process has the key, so what its role cannot read is what an injected statement does not get."""
    readers = {
        label(model): {
            role
            for role in ROLES
            if query("SELECT has_column_privilege(%s, %s, %s, 'SELECT')", role, model._meta.db_table, column)[0][0]
        }
        for model, column in sealed_columns()
    }

    assert readers == READERS_OF_SEALED
