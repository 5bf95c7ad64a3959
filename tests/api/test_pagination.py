"""Pages of OpenAI lists, walked over the audit log's neighbour with the fewest rules: invitations."""

import datetime
import time

import pytest
from django.db.models import Func, QuerySet, TextField

from apps.accounts.models import Invitation, Organization, User
from apps.batches.completions.records import record_completions
from apps.core.database.clock import db_now
from apps.core.database.read_times import read_seconds
from apps.core.errors import InvalidValue
from apps.interfaces.api.requests.handlers import read_query
from apps.interfaces.api.requests.pagination import PageQuery, page
from tests.factories.usage import make_completion


@pytest.fixture
def rows(organization: Organization, alice: User) -> QuerySet[Invitation]:
    """Five rows, two of them made in the same instant."""
    now = db_now()
    for number, age in enumerate((0, 1, 1, 2, 3)):
        Invitation.objects.create(
            organization=organization, email=f"{number}@example.com", role="viewer", token_sha256=str(number),
            invited_by=alice, created_at=now - datetime.timedelta(hours=age), expires_at=now,
        )  # fmt: skip
    return Invitation.objects.for_organization(organization)


def read(rows: QuerySet[Invitation], **query: str) -> dict:
    return page(read_query(query, PageQuery), rows, lambda row: {"id": row.pk, "created_at": row.created_at})


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 20])
def test_a_walk_sees_every_row_once_and_newest_first(rows: QuerySet[Invitation], limit: int) -> None:
    seen: list[dict] = []
    answer = read(rows, limit=str(limit))
    seen += answer["data"]
    while answer["has_more"]:
        answer = read(rows, limit=str(limit), after=seen[-1]["id"])
        seen += answer["data"]

    assert len({row["id"] for row in seen}) == len(seen) == 5
    assert [row["created_at"] for row in seen] == sorted((row["created_at"] for row in seen), reverse=True)


def test_the_last_page_says_so(rows: QuerySet[Invitation]) -> None:
    assert read(rows, limit="5")["has_more"] is False


def test_an_empty_list_has_no_first_item(organization: Organization) -> None:
    assert read(Invitation.objects.none()) == {
        "object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None,
    }  # fmt: skip


@pytest.mark.parametrize("after", ["inv_unknown", "\x00", "x" * 500])
def test_an_unknown_cursor_is_refused(rows: QuerySet[Invitation], after: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(rows, after=after)

    assert caught.value.param == "after"


def test_another_tenants_cursor_is_unknown(rows: QuerySet[Invitation], rival: Organization, charlie: User) -> None:
    foreign = Invitation.objects.create(
        organization=rival, email="r@example.com", role="viewer", token_sha256="r", invited_by=charlie,
        expires_at=db_now(),
    )  # fmt: skip

    with pytest.raises(InvalidValue):
        read(rows, after=foreign.pk)


@pytest.mark.parametrize("limit", ["0", "-1", "101", "many", "1.5", "", "9" * 400, "²"])
def test_a_limit_out_of_range_is_refused(rows: QuerySet[Invitation], limit: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(rows, limit=limit)

    assert caught.value.param == "limit"


def test_the_databases_time_for_a_list_counts_with_the_request(rows: QuerySet[Invitation]) -> None:
    sleep = Func(template="pg_sleep(0.04)::text", output_field=TextField())
    before, own = read_seconds(), time.thread_time()

    read(rows.annotate(slept=sleep))  # five times 0.04 s, in which this thread only waits

    assert 0.15 < read_seconds() - before < 5 and time.thread_time() - own < 0.15


def test_a_client_deletes_what_a_page_lists_and_then_asks_for_the_next(api_client, key, organization) -> None:
    records = [
        make_completion(organization_id=organization.pk, key_id=key.key.pk, created=int(db_now().timestamp()))
        for _ in range(5)
    ]
    record_completions(records=records)
    client, path = api_client(key), "/v1/chat/completions"
    deleted, after = [], ""

    while True:
        found = client.get(f"{path}?limit=2{after}").json()
        for each in found["data"]:
            assert client.delete(f"{path}/{each['id']}").status_code == 200
            deleted.append(each["id"])
        if not found["has_more"]:
            break
        after = f"&after={found['last_id']}"

    assert sorted(deleted) == sorted(record.id for record in records)
