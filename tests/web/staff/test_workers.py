"""Workers in the operator console: their page, and cordoning, draining and revoking them."""

import html

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from apps.contracts import runs as wire
from apps.core.models import AuditEntry
from apps.finetuning.models import Worker
from tests.factories.finetuning import make_worker


@pytest.mark.parametrize(("action", "field"), [("cordon", "cordoned_at"), ("drain", "drain_requested_at")])
def test_workers_are_cordoned_and_drained(console, floor, action, field):
    console.post(f"/staff/workers/{floor.worker.pk}/{action}")

    assert getattr(Worker.objects.get(pk=floor.worker.pk), field) is not None
    assert AuditEntry.objects.filter(target=floor.worker.pk).exists()


def test_a_worker_is_revoked_once_its_name_is_typed(console, floor, claim):
    floor.job()
    claim()
    worker, address = floor.worker, f"/staff/workers/revoke?worker={floor.worker.pk}"
    asked = " ".join(console.get(address).content.decode().split())
    refused = console.post(address, {"worker": worker.pk, "confirm": "another"})
    kept = Worker.objects.get(pk=worker.pk).revoked_at
    done = console.post(address, {"worker": worker.pk, "confirm": worker.hostname})

    assert "1 job loses its work since the last checkpoint" in asked and worker.hostname in asked
    assert (refused.status_code, kept, done.headers["Location"]) == (422, None, f"/staff/workers/{worker.pk}")
    at = Worker.objects.get(pk=worker.pk).revoked_at
    assert at is not None
    console.post(address, {"worker": worker.pk, "confirm": worker.hostname})
    assert Worker.objects.get(pk=worker.pk).revoked_at == at
    assert AuditEntry.objects.filter(target=worker.pk, action="worker.revoked").count() == 1


def test_workers_are_revoked_together_from_their_list_and_read_at_once(console, floor):
    ids = [floor.worker.pk, *(make_worker(floor.pool, credential=f"annw_{count}").pk for count in range(3))]
    with CaptureQueriesContext(connection) as of_one:
        console.get("/staff/workers/revoke", {"worker": ids[:1]})
    with CaptureQueriesContext(connection) as of_all:
        asked = console.get("/staff/workers/revoke", {"worker": ids}).content.decode()

    done = console.post("/staff/workers/revoke", {"worker": ids, "confirm": "4 workers"})

    assert len(of_all) == len(of_one) and asked.count("It works on no job.") == 4
    assert done.headers["Location"] == "/staff/workers"
    assert not Worker.objects.filter(revoked_at=None).exists()


def test_a_cordon_is_undone_from_its_message(console, floor):
    page = console.post(f"/staff/workers/{floor.worker.pk}/cordon", follow=True).content.decode()

    assert f'<form method="post" action="/staff/workers/{floor.worker.pk}/uncordon">' in page and "Undo" in page

    console.post(f"/staff/workers/{floor.worker.pk}/drain")
    page = console.post(f"/staff/workers/{floor.worker.pk}/uncordon", follow=True).content.decode()
    assert "takes work again" in page and f'action="/staff/workers/{floor.worker.pk}/drain">' in page


@pytest.mark.parametrize(("before", "undo"), [("uncordon", "uncordon"), ("cordon", "undrain"), ("drain", None)])
def test_a_drain_is_undone_to_the_state_before_it(console, floor, before, undo):
    address = f"/staff/workers/{floor.worker.pk}"
    console.post(f"{address}/{before}", follow=True)
    kept = Worker.objects.values_list("cordoned_at", "drain_requested_at").get()

    page = console.post(f"{address}/drain", follow=True).content.decode()

    assert "Undo" in page if undo else "Undo" not in page
    if undo:
        assert f'<form method="post" action="{address}/{undo}">' in page.partition("data-toasts")[2]
        console.post(f"{address}/{undo}")
        assert Worker.objects.values_list("cordoned_at", "drain_requested_at").get() == kept


@pytest.mark.slow
def test_a_worker_shows_its_load_its_attempts_and_its_changes(console, floor, claim):
    another, job = floor.job(), floor.job()
    claim()
    claim().start().report(
        wire.StepCompleted, step=1, total_steps=10, epoch=0.1, train_loss=1.0, learning_rate=1e-3, grad_norm=None,
        trained_tokens=5, tokens_per_second=1.0, training_seconds=1.0, gpu_utilization=0.5, memory_bytes=3 * 2**30,
    )  # fmt: skip
    console.post(f"/staff/workers/{floor.worker.pk}/cordon")

    page = html.unescape(console.get(f"/staff/workers/{floor.worker.pk}").content.decode())
    pool = console.get(f"/staff/pools/{floor.pool.pk}").content.decode()

    assert f'href="/staff/jobs/{job.pk}"' in page and f'href="/staff/jobs/{job.pk}"' in pool
    assert f'href="/staff/workers/{floor.worker.pk}"' in pool and f'href="/staff/jobs/{another.pk}"' in pool
    for shown in (page, pool):
        dialog = shown.partition(f'id="drain-{floor.worker.pk}"')[2].partition("</dialog>")[0]
        assert all(f'href="/staff/jobs/{each.pk}"' in dialog for each in (job, another)) and "of Acme" in dialog
    assert "Drain, moves 2 jobs" in page and "on 2 of 4 GPUs" in " ".join(pool.split())
    assert "worker.cordoned" in page and "Olga" in page and "Cordoned" in page
    assert "50%" in page and "3 GiB" in page
    assert f'href="/staff/workers/{floor.worker.pk}"' in console.get("/staff/audit").content.decode()
    assert f'href="/staff/workers/{floor.worker.pk}"' in console.get(f"/staff/jobs/{job.pk}").content.decode()
    assert console.get("/staff/workers/worker_x").status_code == 404
