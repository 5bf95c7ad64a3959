"""Django's PostgreSQL backend without the second index that Django creates on each text key for LIKE.

Our databases compare text by bytes (collation C, `deploy/postgres/roles.sql`), so the first index serves LIKE too. Of
532 indexes, 211 were such copies, and each row written paid for them.
"""

from django.db.backends.postgresql import base, schema


class SchemaEditor(schema.DatabaseSchemaEditor):
    def _create_like_index_sql(self, model: object, field: object) -> None:
        return None


class DatabaseWrapper(base.DatabaseWrapper):
    SchemaEditorClass = SchemaEditor
