"""Uploaded adapters are examined by an idle trainer before they are served, and its numbers become a certificate."""

import datetime
import hashlib

import msgspec
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db.models import F

from apps.accounts.models import Organization
from apps.adapters.models import AdapterVersion
from apps.contracts.parity import PARITY_FILE, ParityChat, ParityProbe, ParityRow
from apps.contracts.runs import Manifest
from apps.contracts.worker_api import ExaminationReport, ExaminationRequest
from apps.core.database.clock import db_now
from apps.core.objects.store import read_object
from apps.finetuning.models import Examination, Worker
from apps.finetuning.results.examinations import record, release_overdue
from apps.finetuning.results.examinations import take as take_as
from apps.serving.models import Deployment
from apps.serving.operations import deploy
from tests.factories.accounts import make_key, make_organization
from tests.factories.finetuning import adapter_files, make_worker

ROW = ParityRow(token_ids=(1, 2, 3), tuned=(-0.5, -1.0), base=(-2.0, -3.0))
PROBE = ParityProbe(rows=(ROW, ROW))


def upload(floor, client) -> AdapterVersion:
    files = adapter_files(floor.base_model)
    form = {
        "name": "mine",
        "adapter_config": SimpleUploadedFile("adapter_config.json", files["adapter_config.json"]),
        "weights": SimpleUploadedFile("adapter_model.safetensors", files["adapter_model.safetensors"]),
    }
    made = client.post("/api/v1/adapters", form, format="multipart").json()
    return AdapterVersion.objects.get(pk=made["id"])


@pytest.fixture
def version(floor, api_client, key) -> AdapterVersion:
    return upload(floor, api_client(key))


def take(call) -> ExaminationRequest:
    return msgspec.json.decode(call("/examinations/next").content, type=ExaminationRequest)


def is_served(version: AdapterVersion) -> bool:
    return Deployment.objects.filter(adapter_version=version, removed_at=None).exists()


def test_a_trainers_probe_joins_the_files_and_then_the_adapter_is_served(version, floor, call):
    taken = take(call)
    assert (taken.base_model.name, taken.lora_rank) == (floor.base_model.name, version.rank)
    assert {file.name for file in taken.adapter.files} == {
        "adapter_config.json", "adapter_model.safetensors", "manifest.json",
    }  # fmt: skip
    assert call("/examinations/next").status_code == 204, "it has one trainer at a time"

    assert call("/examinations", ExaminationReport(id=taken.id, probe=PROBE)).status_code == 204

    version.refresh_from_db()
    sealed = read_object(f"{version.object_prefix}/manifest.json")
    assert hashlib.sha256(sealed).hexdigest() == version.manifest_sha256
    names = {file.name: file.sha256 for file in msgspec.json.decode(sealed, type=Manifest).files}
    probe = read_object(f"{version.object_prefix}/{PARITY_FILE}")
    assert names[PARITY_FILE] == hashlib.sha256(probe).hexdigest()
    assert msgspec.json.decode(probe, type=ParityProbe) == PROBE and is_served(version)
    assert call("/examinations", ExaminationReport(id=taken.id, probe=PROBE)).status_code == 404, "it answers once"


@pytest.mark.parametrize(
    "row",
    [
        msgspec.structs.replace(ROW, tuned=(-1.0,)),
        msgspec.structs.replace(ROW, base=(-1.0, 5.0)),
        msgspec.structs.replace(ROW, token_ids=(1, 2, 10**9)),
        msgspec.structs.replace(ROW, token_ids=(1, 2, -1)),
        ParityRow(token_ids=(1,), tuned=(), base=()),
        ParityRow(token_ids=(1,) * 3_000, tuned=(-1.0,) * 2_999, base=(-1.0,) * 2_999),
    ],
)
def test_numbers_that_no_engine_could_score_are_refused(row, version, call):
    taken = take(call)

    assert call("/examinations", ExaminationReport(id=taken.id, probe=ParityProbe(rows=(row,)))).status_code == 400

    assert not is_served(version)
    long = ParityChat(messages=({"role": "user", "content": "x" * 40_000},), token_ids=(1,))
    for probe in (ParityProbe(rows=(ROW,) * 9), ParityProbe(rows=(ROW,), chat=long)):
        assert call("/examinations", ExaminationReport(id=taken.id, probe=probe)).status_code == 400


def test_an_adapter_that_no_trainer_examines_is_served_without_a_certificate(version, call):
    for _ in range(2):
        taken = take(call)
        assert call("/examinations", ExaminationReport(id=taken.id, error="no memory")).status_code == 204
    assert call("/examinations/next").status_code == 204
    assert is_served(version) and Examination.objects.get().problem == "no memory"
    assert PARITY_FILE not in str(AdapterVersion.objects.get().manifest)


def test_a_trainer_that_falls_silent_is_not_waited_for(version, call):
    take(call)
    now = db_now()

    assert release_overdue(now=now + datetime.timedelta(minutes=20)) == 0
    assert release_overdue(now=now + datetime.timedelta(minutes=36)) == 1 and is_served(version)
    assert release_overdue(now=now + datetime.timedelta(hours=1)) == 0


def test_files_that_are_served_do_not_change(version, call):
    taken = take(call)
    deploy(version=version, by="user_1")

    assert call("/examinations", ExaminationReport(id=taken.id, probe=PROBE)).status_code == 204

    assert PARITY_FILE not in str(AdapterVersion.objects.get().manifest)
    assert Deployment.objects.count() == 1


@pytest.mark.slow
def test_organizations_take_turns_and_each_has_one_trainer_at_a_time(floor, api_client, key, rival, charlie):
    asked = [upload(floor, api_client(key)) for _ in range(2)]
    other = upload(floor, api_client(make_key(rival, charlie)))
    workers = [floor.worker, *(make_worker(floor.pool, credential=f"annw_{number}") for number in range(2))]

    taken = [take_as(worker=worker) for worker in workers]

    assert [each and each.adapter.id for each in taken] == [asked[0].pk, other.pk, None]
    for worker, each in zip(workers[:2], taken[:2], strict=True):
        record(worker=worker, report=ExaminationReport(id=each.id, error="no memory"))
    again = [take_as(worker=worker).adapter.id for worker in workers[:2]]
    assert again == [asked[0].pk, other.pk]
    Examination.objects.update(asked_at=F("asked_at") - datetime.timedelta(minutes=11))
    Examination.objects.filter(ended_at=None).update(worker=None)
    assert take_as(worker=workers[2]) is None, "its time is over"


@pytest.mark.slow
def test_organizations_that_share_their_limits_take_turns_as_one(floor, api_client, rival, charlie):
    for each in (rival, make_organization("Second", owner=charlie)):
        upload(floor, api_client(make_key(each, charlie)))
    other = make_worker(floor.pool, credential="annw_other")

    assert take_as(worker=floor.worker) is not None and take_as(worker=other) is None


def test_an_adapter_of_a_suspended_organization_waits(version, call, organization):
    later = db_now() + datetime.timedelta(minutes=11)
    Organization.objects.filter(pk=organization.pk).update(suspended_at=db_now())
    assert call("/examinations/next").status_code == 204
    assert release_overdue(now=later) == 0 and not is_served(version)

    Organization.objects.filter(pk=organization.pk).update(suspended_at=None)

    assert take(call).adapter.id == version.pk


def test_without_a_trainer_an_adapter_is_served_at_once(floor, api_client, key, request):
    Worker.objects.update(last_seen_at=db_now() - datetime.timedelta(hours=1))

    version = request.getfixturevalue("version")

    assert is_served(version) and not Examination.objects.exists()


def test_others_get_no_examination(version, call):
    assert call("/examinations/next", credential="annw_wrong").status_code == 401
    Worker.objects.update(cordoned_at=db_now())
    assert call("/examinations/next").status_code == 204
    Worker.objects.update(cordoned_at=None, kind="replica")
    assert call("/examinations/next").status_code == 204
    report = ExaminationReport(id=Examination.objects.get().pk, probe=PROBE)
    assert call("/examinations", report).status_code == 403
    assert not is_served(version)
