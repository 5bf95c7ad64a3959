"""Drop the indexes for LIKE that earlier migrations made beside the plain ones; no new database has them."""

from typing import Any

from django.db import migrations

_FOUND = """
    SELECT quote_ident(indexname) FROM pg_indexes
     WHERE schemaname = 'public' AND indexname LIKE '%\\_like' AND indexdef LIKE '%\\_pattern\\_ops)'
"""


def drop(apps: Any, schema_editor: Any) -> None:
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(_FOUND)
        for (name,) in cursor.fetchall():
            cursor.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")  # waits for nobody, and nobody for it


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("core", "0001_initial")]

    operations = [migrations.RunPython(drop, migrations.RunPython.noop)]
