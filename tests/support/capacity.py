"""Time that passes for the nodes of elastic pools."""

from django.db import connection


def age_nodes(seconds: float) -> None:
    """Move what the reconciliation of a pool measures by so many seconds into the past."""
    with connection.cursor() as cursor:
        for table, column in (
            ("finetuning_capacitynode", "requested_at"), ("finetuning_worker", "created_at"),
            ("finetuning_run", "finished_at"), ("finetuning_poolcapacity", "retry_at"),
            ("finetuning_workertoken", "expires_at"),
        ):  # fmt: skip
            cursor.execute(f"UPDATE {table} SET {column} = {column} - make_interval(secs => %s)", [seconds])
