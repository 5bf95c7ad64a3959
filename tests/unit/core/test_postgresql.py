"""Text is compared by its bytes, so that the one index of a text key serves LIKE too."""

import importlib

from django.db import connection

from apps.accounts.models import Organization

migration = importlib.import_module("apps.core.migrations.0002_one_index_for_like")


def indexes_for_like() -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT indexname FROM pg_indexes WHERE schemaname = 'public' AND indexdef LIKE '%pattern_ops%'")
        return [name for (name,) in cursor.fetchall()]


def test_a_search_for_a_beginning_uses_the_plain_index(db: None) -> None:
    assert not indexes_for_like()
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
    assert "Index Cond" in Organization.objects.filter(pk__startswith="org_").explain()


def test_an_older_databases_indexes_for_like_are_dropped(transactional_db: None) -> None:
    with connection.cursor() as cursor:
        cursor.execute('CREATE INDEX "old_Name_like" ON core_outboxmessage (topic varchar_pattern_ops)')
    with connection.schema_editor(atomic=False) as editor:
        migration.drop(None, editor)

    assert not indexes_for_like()
