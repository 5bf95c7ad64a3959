"""Many rows from one that is stored: for plans and speeds that only large tables show."""

from django.db import connection
from django.db.models import AutoField, Model


def copy_rows(row: Model, *, count: int, **columns: str) -> None:
    """Insert copies of a stored row. `columns` are SQL of what differs, over `number`, which is from 1 to `count`."""
    fields = row._meta.concrete_fields
    names = [each.column for each in fields if each.column in columns or not isinstance(each, AutoField)]
    quote = connection.ops.quote_name
    values = [columns.get(name) or f"(one.template).{quote(name)}" for name in names]
    table, key = quote(row._meta.db_table), quote(row._meta.pk.column)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(map(quote, names))}) SELECT {', '.join(values)}"
            f" FROM (SELECT template FROM {table} AS template WHERE {key} = %s) AS one"
            " CROSS JOIN generate_series(1, %s) AS number",
            [row.pk, count],
        )


def numbered(prefix: str, number: str = "number") -> str:
    """Return the SQL of the id that copy `number` has."""
    return f"'{prefix}' || lpad(({number})::text, 26, '0')"
