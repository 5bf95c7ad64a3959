"""Jobs lock the files that they name."""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
from django.db import connection, transaction

from apps.datasets.models import DatasetVersion
from apps.finetuning.jobs.files import usable_files
from tests.factories.datasets import make_version


def ask(statement: str, *arguments: object) -> object:
    with connection.cursor() as cursor:
        cursor.execute(statement, arguments)
        return cursor.fetchone()[0]


@pytest.mark.django_db(transaction=True)
def test_two_jobs_with_the_same_files_in_opposite_roles_do_not_wait_for_each_other(organization) -> None:
    first, second = sorted(make_version(organization, filename=f"{name}.jsonl").pk for name in "ab")
    pids: SimpleQueue[object] = SimpleQueue()

    def other_job() -> list[str]:
        try:
            with transaction.atomic():
                pids.put(ask("SELECT pg_backend_pid()"))
                return [file.pk for file in usable_files(organization, second, first) if file]
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as threads, transaction.atomic():
        DatasetVersion.objects.select_for_update(no_key=True).get(pk=first)
        other = threads.submit(other_job)
        pid = pids.get(timeout=60)
        waits = "SELECT pg_backend_pid() = ANY(pg_blocking_pids(%s)) FROM pg_sleep(0.01)"
        assert any(ask(waits, pid) for _ in range(3_000)), "the other job waits for the first file"
        assert usable_files(organization, first, second)[1]  # it would hold the second file already

    assert other.result() == [second, first]
