"""A year of an installation: jobs with their events, runs and money, made by copying one row of each kind in SQL.

Foreign keys and the triggers of the tables are left out, which only writes need. One organization in 200 is large: it
has a twentieth of everything.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from django.db import connection
from django.db.models import Model

from tests.factories.many_rows import copy_rows, numbered

OPEN_JOBS = 3_000  # a third of them each: queued, running, paused
WORKERS = 100
_LARGE_SHARE = 20
_JOBS_OF_FILE = 10
_EVENTS_OF_SHOWN_JOB = 5_000
# What the trigger of runs would have added to their days.
_ENDED_RUNS = (
    "SELECT 1, organization_id, pool_id, job_id, leased_at, finished_at, billed_gpu_ms FROM finetuning_run"
    " WHERE finished_at IS NOT NULL"
)


class Size(NamedTuple):
    jobs: int
    events: int
    organizations: int


def fill(size: Size) -> dict[str, str]:
    """Migrate an empty database and fill it; return ids of things to look at, and the session keys of two people."""
    from django.core.management import call_command

    from apps.finetuning.models.runs import add_gpu_days
    from apps.finetuning.runs.queue.shares import repair_shares

    call_command("migrate", verbosity=0)
    call_command("collectstatic", interactive=False, verbosity=0)
    made = _first_rows()
    with _bare_tables([type(row) for row in made.values()]):
        _copy_jobs(made, size)
        _copy_money(made, size)
        _copy_models(made, size)
    with connection.cursor() as cursor:
        cursor.execute(add_gpu_days(_ENDED_RUNS))
        cursor.execute("VACUUM ANALYZE")
    repair_shares()
    return _places(made)


def _first_rows() -> dict[str, Any]:
    """Make one row of each kind, by the operations of the product."""
    from django.db import transaction

    from apps.billing.models import Hold, LedgerCheck, LedgerEntry, LedgerTransaction, TrafficHour, UsageSeries
    from apps.billing.usage.traffic import BOUNDS_MS
    from apps.core.audit import record
    from apps.core.database.clock import db_now
    from apps.core.models import AuditEntry, OutboxMessage
    from apps.finetuning.models import JobEvent, RunUpload, Worker
    from apps.payments.models import TopUp
    from apps.serving.models import Deployment
    from tests.factories.accounts import make_organization, make_user
    from tests.factories.finetuning import TrainingSetup, make_checkpoint
    from tests.factories.serving import make_version

    organization = make_organization("Bench", owner=make_user("owner"))
    floor = TrainingSetup(organization)
    job = floor.job()
    series = UsageSeries.objects.create(
        organization=organization, sku="inference:input:tiny", price_rule_id=job.price_rule_id, subject="tiny",
        day=job.created_at.date(), quantity=9, request_count=3, rated_quantity=9, rated_request_count=3, posted_nano=7,
    )  # fmt: skip
    counts = [1] * (len(BOUNDS_MS) + 1)
    sums = dict.fromkeys(
        ("requests", "aborted", "rate_limited", "over_quota", "not_found", "invalid", "failed", "input_tokens",
         "cached_input_tokens", "output_tokens", "cost_nano"), 50,
    )  # fmt: skip
    version = make_version(organization, floor.base_model, status="ready")
    with transaction.atomic():
        record(organization=organization, by="system", action="job.created", target=job.pk)
    return {
        "organization": organization,
        "worker": Worker.objects.get(),
        "job": job,
        "run": job.runs.get(),
        "event": job.events.first() or JobEvent.objects.create(
            id="ftevent-x-1", organization=organization, job=job, sequence=999_999, message="Step"
        ),
        "hold": Hold.objects.get(source=job.pk),
        "transaction": LedgerTransaction.objects.latest("created_at"),
        "entry": LedgerEntry.objects.latest("id"),
        "series": series,
        "traffic": TrafficHour.objects.create(
            organization=organization, model_name="tiny", hour_at=db_now(), first_token_counts=counts,
            latency_counts=counts, **sums,
        ),
        "file": job.training_file,
        "dataset": job.training_file.dataset,
        "adapter": version.adapter,
        "version": version,
        "deployment": Deployment.objects.create(organization=organization, adapter_version=version),
        "checkpoint": (checkpoint := make_checkpoint(organization, floor.base_model, step=5)),
        "upload": RunUpload.objects.get(pk=checkpoint.upload_id),
        "audit": AuditEntry.objects.latest("id"),
        "message": OutboxMessage.objects.latest("id"),
        "check": LedgerCheck.objects.create(name="sums", difference_count=0),
        "topup": TopUp.objects.create(
            organization=organization, origin="user", amount_cents=5000, requested_by="system", status="paid",
            paid_at=db_now(),
        ),
    }  # fmt: skip


def _of_year(count: int) -> str:
    """Return the SQL of the moment of each of `count` copies, the oldest first."""
    return f"now() - ({count} - number) * interval '365 days' / {count}"


def _owner(size: Size, large: Model) -> str:
    other = numbered("org_", f"1 + mod(number, {size.organizations - 1})")
    return f"CASE WHEN mod(number, {_LARGE_SHARE}) = 0 THEN '{large.pk}' ELSE {other} END"


def _copy_jobs(made: dict[str, Any], size: Size) -> None:
    count, owner, at = size.jobs, _owner(size, made["organization"]), _of_year(size.jobs)
    is_open = f"number > {count - OPEN_JOBS}"
    ended = f"CASE WHEN {is_open} THEN NULL ELSE {at} + interval '1 hour' END"
    worker = numbered("worker_", f"1 + mod(number, {WORKERS})")
    copy_rows(
        made["organization"], count=size.organizations - 1, id=numbered("org_"), slug="'tenant-' || number",
        name="'Tenant ' || number", has_own_share="true",
    )  # fmt: skip
    copy_rows(
        made["worker"], count=WORKERS, id=numbered("worker_"), credential_sha256="lpad(number::text, 64, '0')",
        last_seen_at="now() + interval '1 day'",
    )  # fmt: skip
    copy_rows(
        made["job"], count=count, id=numbered("ftjob-"), organization_id=owner, created_at=at, queued_at=at,
        started_at=at, finished_at=ended, suffix="'bot-' || number", billed_gpu_ms="mod(number, 1000) * 1000",
        training_file_id=numbered("file-", f"1 + mod(number - 1, {count // _JOBS_OF_FILE})"),
        cost_nano="mod(number, 1000) * 1000",
        status=f"CASE WHEN {is_open} THEN (ARRAY['queued', 'running', 'paused'])[1 + mod(number, 3)]"
        " ELSE (ARRAY['failed', 'cancelled', 'succeeded', 'succeeded', 'succeeded'])[1 + mod(number, 5)] END",
        adapter_version_id=f"CASE WHEN NOT {is_open} AND mod(number, 5) >= 2 THEN {numbered('adpv_')} END",
    )  # fmt: skip
    holding = f"{is_open} AND mod(number, 3) = 1"
    copy_rows(
        made["run"], count=count, id=numbered("run_"), job_id=numbered("ftjob-"), organization_id=owner,
        created_at=at, leased_at=f"CASE WHEN {is_open} AND mod(number, 3) = 0 THEN NULL ELSE {at} END",
        worker_id=f"CASE WHEN {is_open} AND mod(number, 3) = 0 THEN NULL ELSE {worker} END",
        status=f"CASE WHEN {is_open} THEN (ARRAY['queued', 'running', 'paused'])[1 + mod(number, 3)]"
        " ELSE (ARRAY['failed', 'cancelled', 'succeeded', 'succeeded', 'succeeded'])[1 + mod(number, 5)] END",
        finished_at=f"CASE WHEN {is_open} AND mod(number, 3) < 2 THEN NULL ELSE {at} + interval '1 hour' END",
        training_started_at=at, billed_gpu_ms="mod(number, 1000) * 1000",
        **{
            name: f"CASE WHEN {holding} THEN {value} END"
            for name, value in {
                "lease_id": "'lease_' || number", "lease_token_sha256": "lpad(number::text, 64, '0')",
                "lease_expires_at": "now() + interval '1 day'", "heartbeat_at": "now()",
            }.items()
        },
    )  # fmt: skip
    each = max(1, size.events // count)
    job, sequence = f"(1 + (number - 1) / {each})", f"(1 + mod(number - 1, {each}))"
    copy_rows(
        made["event"], count=count * each, id=_event_id(job, sequence), job_id=numbered("ftjob-", job),
        sequence=sequence, organization_id=_owner(size, made["organization"]).replace("number,", f"{job},"),
        type=f"CASE WHEN mod({sequence}, 10) = 0 THEN 'message' ELSE 'metrics' END",
        created_at=at.replace("number", job), data=_METRICS,
    )  # fmt: skip
    shown = str(count - OPEN_JOBS)
    copy_rows(
        made["event"], count=_EVENTS_OF_SHOWN_JOB, id=_event_id(shown, f"{each} + number"), data=_METRICS,
        job_id=numbered("ftjob-", shown), sequence=f"{each} + number", type="'metrics'",
    )  # fmt: skip


_METRICS = (
    """jsonb_build_object('step', number, 'train_loss', 1.5, 'attempt', 1, 'tokens_per_second', 900.0,"""
    """ 'training_seconds', number, 'gpu_utilization', 0.5, 'memory_bytes', 1000000)"""
)


def _event_id(job: str, sequence: str) -> str:
    return f"'ftevent-' || lpad(({job})::text, 26, '0') || '-' || ({sequence})::text"


def _copy_money(made: dict[str, Any], size: Size) -> None:
    count, owner, at = size.jobs, _owner(size, made["organization"]), _of_year(size.jobs)
    is_open = f"number > {count - OPEN_JOBS}"
    copy_rows(
        made["hold"], count=count, id=numbered("hold_"), source=numbered("ftjob-"), organization_id=owner,
        created_at=at, status=f"CASE WHEN {is_open} THEN 'open' ELSE 'closed' END", captured_nano="1000",
        closed_at=f"CASE WHEN {is_open} THEN NULL ELSE {at} + interval '1 hour' END",
    )  # fmt: skip
    copy_rows(
        made["hold"], count=count // 2, id=numbered("hold_", f"{count} + number"), source="'gateway'",
        organization_id=owner, purpose="'inference'", status="'closed'", created_at=_of_year(count // 2),
        closed_at=_of_year(count // 2),
    )  # fmt: skip
    posted = 2 * count
    copy_rows(
        made["transaction"], count=posted, id=numbered("txn_"), idempotency_key="'copy:' || number",
        organization_id=owner, created_at=_of_year(posted), source=numbered("ftjob-", "1 + number / 2"),
        kind="CASE WHEN mod(number, 2) = 0 THEN 'usage' WHEN mod(number, 11) = 0 THEN 'estimate_loss'"
        " ELSE 'settle' END",
    )  # fmt: skip
    copy_rows(
        made["entry"], count=posted, transaction_id=numbered("txn_"), organization_id=owner,
        created_at=_of_year(posted),
    )  # fmt: skip
    copy_rows(
        made["series"], count=min(count, 730_000), organization_id=owner, subject="'model-' || number",
        day=f"({_of_year(min(count, 730_000))})::date",
    )  # fmt: skip
    an_hour = 2 * size.organizations  # each organization has requests for two models
    hours = min(count // an_hour, 30 * 24)
    copy_rows(
        made["traffic"], count=hours * an_hour, model_name="'model-' || number",
        organization_id=numbered("org_", f"1 + mod(number, {size.organizations - 1})"),
        hour_at=f"date_trunc('hour', now()) - ({hours} - number / {an_hour}) * interval '1 hour'",
    )  # fmt: skip
    copy_rows(made["check"], count=60_000, checked_at=_of_year(60_000), name="'check ' || mod(number, 8)")
    copy_rows(made["topup"], count=count // 10, id=numbered("topup_"), created_at=_of_year(count // 10))


def _copy_models(made: dict[str, Any], size: Size) -> None:
    count, owner, at = size.jobs, _owner(size, made["organization"]), _of_year(size.jobs)
    copy_rows(
        made["adapter"], count=count, id=numbered("adp_"), name="'bot-' || number", organization_id=owner,
        created_at=at,
    )  # fmt: skip
    copy_rows(
        made["version"], count=count, id=numbered("adpv_"), adapter_id=numbered("adp_"), organization_id=owner,
        model_name="'ft:tiny:acme:bot:' || number", lora_name="'a-' || number", created_at=at,
        source=numbered("run_"), bytes="20000000",
        exports="CASE WHEN mod(number, 10) = 0 THEN '[{\"kind\": \"gguf\", \"bytes\": 5, \"manifest\": {}}]'::jsonb"
        " ELSE '[]'::jsonb END", export_bytes="CASE WHEN mod(number, 10) = 0 THEN 5 ELSE 0 END",
    )  # fmt: skip
    served = min(20_000, count)
    copy_rows(
        made["deployment"], count=served, id=numbered("dep_"), organization_id=owner,
        adapter_version_id=numbered("adpv_", f"{count} - number"),
    )  # fmt: skip
    copy_rows(
        made["checkpoint"], count=count, id=numbered("ftckpt_"), job_id=numbered("ftjob-"), run_id=numbered("run_"),
        organization_id=owner, created_at=at, bytes="30000000",
        deleted_at=f"CASE WHEN number < {count} * 0.9 THEN now() END",
    )  # fmt: skip
    files = count // _JOBS_OF_FILE
    copy_rows(made["dataset"], count=files, id=numbered("ds_"), name="'rows-' || number", organization_id=owner)
    copy_rows(
        made["file"], count=files, id=numbered("file-"), dataset_id=numbered("ds_"), organization_id=owner,
        created_at=_of_year(files),
    )  # fmt: skip
    copy_rows(made["audit"], count=2 * count, organization_id=owner, created_at=_of_year(2 * count))
    copy_rows(
        made["message"], count=count // 2, key="'copy:' || number", sent_at="now() - interval '1 day'",
        taken_at="now() - interval '1 day'",
    )  # fmt: skip


@contextmanager
def _bare_tables(models: Sequence[type[Model]]) -> Iterator[None]:
    """Leave out foreign keys and triggers for good, and the indexes for as long as the block fills the tables."""
    tables = [model._meta.db_table for model in models]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT conrelid::regclass::text, conname FROM pg_constraint WHERE contype = 'f' AND"
            " (conrelid::regclass::text = ANY(%(tables)s) OR confrelid::regclass::text = ANY(%(tables)s))",
            {"tables": tables},
        )
        for table, name in cursor.fetchall():
            cursor.execute(f'ALTER TABLE {table} DROP CONSTRAINT "{name}"')
        for table in tables:
            cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        cursor.execute(
            "SELECT index.indexrelid::regclass::text, pg_get_indexdef(index.indexrelid) FROM pg_index AS index"
            " LEFT JOIN pg_constraint ON conindid = index.indexrelid"
            " WHERE index.indrelid::regclass::text = ANY(%s) AND conindid IS NULL",
            [tables],
        )
        indexes = cursor.fetchall()
        for name, _ in indexes:
            cursor.execute(f"DROP INDEX {name}")
        yield
        cursor.execute("SET maintenance_work_mem = '1GB'")
        for _, definition in indexes:
            cursor.execute(definition)


def _places(made: dict[str, Any]) -> dict[str, str]:
    from django.conf import settings
    from django.test import Client

    from apps.accounts.models import Membership
    from apps.finetuning.models import FineTuningJob
    from tests.factories.accounts import make_user

    sessions = {}
    people = {
        "operator": make_user("operator", is_operator=True),
        "owner": Membership.objects.get(organization=made["organization"]).user,
    }
    for name, person in people.items():
        client = Client(SERVER_NAME="localhost")
        client.force_login(person, backend=settings.AUTHENTICATION_BACKENDS[0])
        sessions[name] = client.cookies[settings.SESSION_COOKIE_NAME].value
    jobs = FineTuningJob.objects.filter(organization=made["organization"]).order_by("-created_at", "-id")
    number = FineTuningJob.objects.count() - 2 - OPEN_JOBS  # of the job with many events
    return sessions | {
        "organization": made["organization"].pk,
        "pool": made["worker"].pool_id,
        "worker": f"worker_{1:026}",
        "job": f"ftjob-{number:026}",
        "live": jobs.filter(status="running")[0].pk,
        "queued": jobs.filter(status="queued").reverse()[0].pk,
        "deep": jobs[jobs.count() // 2].pk,
        "version": f"adpv_{number:026}",
        "file": made["file"].pk,
    }
