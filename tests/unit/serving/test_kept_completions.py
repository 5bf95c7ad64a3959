"""Stored completions: their rows for a dataset, their deletion, and what the gateway's role may read of them."""

import datetime
import json

import msgspec
import pytest
from django.db import ProgrammingError, connection, transaction

from apps.accounts.models import Organization
from apps.batches.completions import operations
from apps.batches.completions.models import StoredCompletion
from apps.batches.completions.queries import get_completion, list_completions
from apps.batches.completions.records import CompletionRecord, get_allowance, record_completions
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue, NotFound
from apps.interfaces.gateway.requests.schema import parse_chat
from tests.factories.usage import make_completion


def kept(organization: Organization, messages: list[object], answer: object = "Yes.") -> CompletionRecord:
    choices = [{"index": 0, "message": {"role": "assistant", "content": answer}}]
    record = make_completion(
        organization_id=organization.pk, created=int(db_now().timestamp()),
        request=msgspec.Raw(msgspec.json.encode({"messages": messages})),
        answer=msgspec.Raw(msgspec.json.encode({"choices": choices, "usage": {}})),
    )  # fmt: skip
    record_completions(records=[record])
    return record


def test_rows_of_a_dataset_have_joined_texts_and_an_answer(organization) -> None:
    parts = [{"type": "text", "text": "one", "cache": None}, {"type": "text", "text": "two", "cache": None}]
    kept(organization, [{"role": "user", "content": parts, "name": None}])
    kept(organization, [{"role": "user", "content": "silent"}], answer=None)

    (row,) = [json.loads(line) for line in operations._lines(list_completions(organization=organization))]

    assert row["messages"] == [{"role": "user", "content": "one\ntwo"}, {"role": "assistant", "content": "Yes."}]


def test_a_deleted_completion_is_empty_and_does_not_return_from_the_spool(organization) -> None:
    record = kept(organization, [{"role": "user", "content": "secret"}])
    now, before = db_now(), get_allowance(organization=organization.pk).count
    completion = get_completion(organization=organization, id=record.id)
    operations.delete_completion(completion=completion, by="user_1", now=now)
    record_completions(records=[record])  # a dead gateway had it on its disk

    row = StoredCompletion.objects.get(pk=record.id)
    assert (row.request, row.answer, row.metadata, row.bytes) == ("{}", "{}", {}, 0)
    assert get_allowance(organization=organization.pk).count == before + 1
    with pytest.raises(NotFound):
        get_completion(organization=organization, id=record.id)
    stale = StoredCompletion(pk=record.id, metadata={"topic": "secret"}, bytes=record.bytes)
    with pytest.raises(NotFound):  # of a request that read it before its deletion
        operations.set_metadata(completion=stale, metadata={"topic": "secret"}, by="user_1")
    assert operations.delete_expired(now=now + datetime.timedelta(minutes=59)) == 0
    assert operations.delete_expired(now=now + datetime.timedelta(minutes=61)) == 1


def test_the_gateway_adds_completions_and_reads_only_their_sizes(organization) -> None:
    kept(organization, [{"role": "user", "content": "secret"}])
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL ROLE anneal_gateway")
        assert get_allowance(organization=organization.pk).count < 100_000
        record = kept(organization, [{"role": "user", "content": "two"}])
        record_completions(records=[record])
        for column, table in (
            ("request", "completions_storedcompletion"), ("answer", "completions_storedcompletion"),
            ("source", "evals_evalitem"), ("data_source", "evals_evalrun"), ("filename", "batches_batchfile"),
        ):  # fmt: skip
            with pytest.raises(ProgrammingError, match="permission denied"), transaction.atomic():
                cursor.execute(f"SELECT {column} FROM {table}")
        cursor.execute("RESET ROLE")
    assert StoredCompletion.objects.count() == 2


def test_a_long_user_is_not_stored() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "user": "u" * 600}
    assert parse_chat(json.dumps(body).encode()).stored is None
    with pytest.raises(InvalidValue) as refused:
        parse_chat(json.dumps(body | {"store": True}).encode())
    assert refused.value.param == "user"
