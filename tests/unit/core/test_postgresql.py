"""What deploy/postgres/roles.sql sets up.

Text is compared by its bytes, so that the one index of a text key serves LIKE too. The roles that serve requests have
limits of time.
"""

from django.db import connection

from apps.accounts.models import Organization
from apps.core.database.policies import APP_ROLE, OWNER_ROLE, SYSTEM_ROLE
from apps.core.http.statement_limits import SESSION_SECONDS


def indexes_for_like() -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT indexname FROM pg_indexes WHERE schemaname = 'public' AND indexdef LIKE '%pattern_ops%'")
        return [name for (name,) in cursor.fetchall()]


def test_a_search_for_a_beginning_uses_the_plain_index(db: None) -> None:
    assert not indexes_for_like()
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
    assert "Index Cond" in Organization.objects.filter(pk__startswith="org_").explain()


def test_roles_that_serve_requests_have_limits_of_time_and_the_others_none(db: None) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT rolname, rolconfig FROM pg_roles WHERE rolname LIKE 'anneal%'")
        limits = {role: set(settings or ()) for role, settings in cursor.fetchall()}

    serving = {"statement_timeout=30s", "lock_timeout=15s", "transaction_timeout=45min"}
    serving.add(f"idle_in_transaction_session_timeout={SESSION_SECONDS // 60}min")
    assert limits == {
        APP_ROLE: serving,
        "anneal_internal": serving | {"plan_cache_mode=force_generic_plan"},
        "anneal_gateway": serving,
        SYSTEM_ROLE: set(),
        OWNER_ROLE: set(),
    }
