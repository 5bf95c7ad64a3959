"""Text is compared by its bytes, so that the one index of a text key serves LIKE too."""

from django.db import connection

from apps.accounts.models import Organization


def indexes_for_like() -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT indexname FROM pg_indexes WHERE schemaname = 'public' AND indexdef LIKE '%pattern_ops%'")
        return [name for (name,) in cursor.fetchall()]


def test_a_search_for_a_beginning_uses_the_plain_index(db: None) -> None:
    assert not indexes_for_like()
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
    assert "Index Cond" in Organization.objects.filter(pk__startswith="org_").explain()
