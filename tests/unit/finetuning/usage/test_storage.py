"""What an organization keeps: counted whole, billed by the hour, and limited."""

import datetime

import pytest
from django.conf import settings

from apps.accounts.models import Organization
from apps.adapters.models import AdapterVersion
from apps.core.database.clock import db_now
from apps.core.errors import QuotaExceeded
from apps.core.models import AuditEntry
from apps.datasets.intake.uploads import add_part, complete_upload
from apps.datasets.intake.versions import StorageFull
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import storage_used_bytes
from apps.datasets.validation.leases import validate_version
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.models import Checkpoint, FineTuningJob, Quota
from apps.finetuning.results.checkpoint_models import serve_checkpoint
from apps.finetuning.usage import storage
from apps.finetuning.usage.allowances import set_allowance
from apps.finetuning.usage.quotas import get_quota, set_quota
from apps.finetuning.usage.storage import MemberStorage, left_bytes, storage_of_members, stored_bytes
from tests.factories.batches import make_batch_file
from tests.factories.datasets import jsonl, make_upload, make_version
from tests.factories.finetuning import give_credit

pytestmark = pytest.mark.django_db
EXPORTS = [{"kind": "merged_16bit", "bytes": 3_000_000}, {"kind": "gguf", "bytes": 1_000_000}]


@pytest.fixture
def exported(floor, claim) -> AdapterVersion:
    """A trained adapter with two other forms of it."""
    job = floor.job()
    claim().start().succeed(floor.base_model)
    job.refresh_from_db()
    AdapterVersion.objects.filter(pk=job.adapter_version_id).update(exports=EXPORTS)
    return AdapterVersion.objects.get(pk=job.adapter_version_id)


def limit_storage_of(organization, member, byte_count: int) -> None:
    set_allowance(
        organization=organization, scope="member", target=member.pk, limits={"storage_bytes": byte_count},
        by=member.pk, now=db_now(),
    )  # fmt: skip


def limit_storage(organization, byte_count: int) -> None:
    set_quota(organization=organization, by="system", now=db_now(), storage_bytes=byte_count)


def test_exports_count_as_stored_until_their_model_is_deleted(organization, exported):
    files = storage_used_bytes(organizations=[organization.pk]).total()
    assert stored_bytes(organizations=[organization.pk]).total() == files + exported.bytes + 4_000_000

    AdapterVersion.objects.update(deleted_at=db_now())

    assert stored_bytes(organizations=[organization.pk]).total() == files


def test_models_leave_less_room_for_files(organization, exported):
    limit_storage(organization, stored_bytes(organizations=[organization.pk]).total() + 100)

    assert left_bytes(organization=organization) == 100
    with pytest.raises(StorageFull, match="100 bytes of storage left"):
        make_version(organization)


def test_what_a_member_its_keys_and_its_jobs_make_counts_as_stored_by_it(organization, exported, alice, bob, key):
    FineTuningJob.objects.update(member_id=bob.pk)
    old = make_version(organization, by=alice.pk, filename="old.jsonl")
    DatasetVersion.objects.filter(pk=old.pk).update(created_at=db_now() - datetime.timedelta(days=40))
    files = [make_version(organization, by=by, filename=f"{by}.jsonl") for by in (alice.pk, key.key.pk, bob.pk)]
    announced = make_upload(organization, by=alice.pk)
    asks = make_batch_file(organization, by=key.key.pk)

    stored = storage_of_members(organization=organization, begin=db_now() - datetime.timedelta(days=30))

    recent = files[0].bytes + files[1].bytes + announced.bytes + asks.bytes
    assert stored[alice.pk] == MemberStorage(recent + old.bytes, recent)
    assert stored[bob.pk].bytes == files[2].bytes + exported.bytes + 4_000_000
    assert sum(each.bytes for each in stored.values()) == stored_bytes(organizations=[organization.pk]).total()


def test_a_member_stores_no_more_than_its_allowance_and_others_do(floor, organization, alice, bob, key):
    first = make_version(organization, by=key.key.pk)
    limit_storage_of(organization, alice, first.bytes + 100)

    for store in (make_version, make_upload, make_batch_file):
        for by in (alice.pk, key.key.pk):
            with pytest.raises(StorageFull, match=r"allows you, 100 bytes are left.*ask an owner"):
                store(organization, by=by)
        store(organization, by=bob.pk)
    make_version(organization, jsonl(1)[:50], by=alice.pk, filename="small.jsonl")
    limit_storage_of(organization, alice, 1)
    request = JobRequest(base_model=floor.base_model.name, training_file=floor.job().training_file_id)
    with pytest.raises(QuotaExceeded, match="allows the job's member is full"):
        create_job(organization=organization, request=request, by=alice.pk, now=db_now())
    create_job(organization=organization, request=request, by=bob.pk, now=db_now())


def test_a_file_is_read_only_until_it_exceeds_the_allowance_of_its_member(organization, alice):
    limit_storage_of(organization, alice, 1_500)
    chunks = iter([jsonl(10)[:1_000]] * 10)

    with pytest.raises(StorageFull, match="allows you, 1,500 bytes"):
        make_version(organization, chunks=chunks, by=alice.pk)

    assert len(list(chunks)) == 8


def test_rows_that_are_written_beside_a_file_stay_within_the_allowance_of_its_member(organization, alice):
    table = b"prompt,completion\n" + b"Hi,Hello\n" * 500
    version = make_version(organization, table, filename="a.csv", by=alice.pk)
    limit_storage_of(organization, alice, len(table) + 1_000)

    done = validate_version(version_id=version.pk, now=db_now())

    assert done and done.errors[0]["code"] == "storage_full" and "allows you, 1,000 bytes" in done.errors[0]["message"]


def test_an_upload_counts_for_the_member_who_announced_it_also_once_another_completes_it(organization, alice, bob):
    upload = make_upload(organization, by=alice.pk)
    part = add_part(upload=upload, chunks=[jsonl()], by=bob.pk, now=db_now())
    limit_storage_of(organization, bob, 1)

    done = complete_upload(upload=upload, part_ids=[part.pk], by=bob.pk, now=db_now())

    assert storage_of_members(organization=organization) == {alice.pk: MemberStorage(len(jsonl()))}
    assert AuditEntry.objects.get(action="dataset.uploaded", target=done.version_id).actor == bob.pk


def test_a_full_storage_takes_no_job_whose_result_would_have_no_place(floor, organization):
    limit_storage(organization, 1)

    with pytest.raises(QuotaExceeded, match="storage is full"):
        floor.job()


def test_an_organization_that_never_had_credit_has_small_limits(organization):
    before = get_quota(organization=organization)
    give_credit(organization)
    after = get_quota(organization=organization)

    assert {name: getattr(before, name) for name in settings.UNPAID_LIMITS} == settings.UNPAID_LIMITS
    assert after.storage_bytes == Quota().storage_bytes > before.storage_bytes


def test_what_an_operator_set_holds_with_and_without_credit(organization):
    limit_storage(organization, 7_000_000_000)

    assert get_quota(organization=organization).storage_bytes == 7_000_000_000


def test_a_checkpoint_is_not_copied_into_a_full_storage(floor, organization, claim):
    floor.job()
    claim().start().checkpoint(5, 10.0)
    limit_storage(organization, 1)

    with pytest.raises(QuotaExceeded, match="storage is full"):
        serve_checkpoint(organization=organization, checkpoint_id=Checkpoint.objects.get().pk)


def test_a_suspended_organization_is_charged_for_nothing_it_keeps(organization, rival, monkeypatch):
    sampled = []
    monkeypatch.setattr(storage, "record_storage", lambda *, organization, **_: sampled.append(organization.pk) or 1)
    Organization.objects.filter(pk=rival.pk).update(suspended_at=db_now())

    storage.sample_storage(now=db_now())

    assert {organization.pk, rival.pk} & set(sampled) == {organization.pk}
