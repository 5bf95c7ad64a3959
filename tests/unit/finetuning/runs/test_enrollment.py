"""A one-time token admits one worker of its kind, once, within its day."""

import datetime

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from apps.contracts.worker_api import EnrollRequest
from apps.core.database.clock import db_now
from apps.finetuning.models import Worker, WorkerToken
from apps.finetuning.pools import operations


@pytest.fixture
def token(floor) -> str:
    return operations.issue_worker_token(pool=floor.pool, kind="trainer", base_model=None, by="user_olga")


def enroll(token: str, kind: str = "trainer"):
    return operations.enroll(request=EnrollRequest(token=token, kind=kind, hostname="gpu-1"))


def assert_refused(token: str, kind: str = "trainer") -> None:
    before = Worker.objects.count()
    with pytest.raises(operations.InvalidWorkerCredential) as refused:
        enroll(token, kind)
    assert (refused.value.status, refused.value.param) == (401, "token")
    assert Worker.objects.count() == before


def test_a_token_admits_one_worker_whose_credential_then_holds(token, floor):
    worker, _, answer = enroll(token)

    assert operations.authenticate(credential=answer.credential) == worker
    assert (worker.pool, answer.pool, worker.hostname) == (floor.pool, floor.pool.name, "gpu-1")


def test_the_pool_keeps_its_region_while_a_worker_is_admitted(token):
    with CaptureQueriesContext(connection) as captured:
        enroll(token)

    locks = [query["sql"] for query in captured if "FOR NO KEY UPDATE" in query["sql"]]
    assert [sql.split("FOR NO KEY UPDATE OF ")[1] for sql in locks] == [
        '"finetuning_workertoken", "finetuning_gpupool"'
    ]


def test_a_used_token_is_refused(token):
    enroll(token)

    assert_refused(token)


def test_an_expired_token_is_refused(token):
    WorkerToken.objects.update(expires_at=db_now() - datetime.timedelta(seconds=1))

    assert_refused(token)


def test_a_token_of_another_kind_is_refused_and_stays_usable(token):
    assert_refused(token, "replica")

    assert enroll(token)


@pytest.mark.parametrize("wrong", ["", "annt_made-up"])
def test_a_token_that_was_never_issued_is_refused(token, wrong):
    assert_refused(wrong)


def test_a_revoked_worker_is_refused_at_its_next_call(token):
    worker, _, answer = enroll(token)

    operations.revoke(worker=worker, by="user_olga")

    with pytest.raises(operations.InvalidWorkerCredential):
        operations.authenticate(credential=answer.credential)
