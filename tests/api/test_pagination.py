"""Pages of OpenAI lists, walked over the audit log's neighbour with the fewest rules: invitations."""

import datetime
import json
import re
import time
from collections.abc import Sequence

import pytest
from django.db.models import Func, QuerySet, TextField

from apps.accounts.models import Invitation, Notification, Organization, User
from apps.batches.completions.records import record_completions
from apps.batches.files import create_file
from apps.core.database.clock import db_now
from apps.core.database.read_times import read_seconds
from apps.core.errors import InvalidValue
from apps.interfaces.api.requests.handlers import read_query
from apps.interfaces.api.requests.pagination import PageQuery, page
from apps.serving.models import Alias
from tests.factories import datasets
from tests.factories.accounts import make_key
from tests.factories.batches import make_batch, make_line
from tests.factories.finetuning import TrainingSetup
from tests.factories.serving import make_adapter, make_served_model, make_version
from tests.factories.usage import make_completion

_NAMES = ("one", "two", "three")
GRADER = {"type": "string_check", "name": "a", "input": "red", "reference": "red", "operation": "eq"}


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


def make_completions(organization: Organization, alice: User) -> None:
    record_completions(
        records=[
            make_completion(organization_id=organization.pk, key_id="key_1", created=int(db_now().timestamp()))
            for _ in range(5)
        ]
    )


def make_files(organization: Organization, alice: User) -> None:
    for number in range(3):
        datasets.make_ready_version(organization, filename=f"{number}.jsonl")
    for _ in range(2):
        create_file(organization=organization, filename="a.jsonl", chunks=[b"{}"], by=alice.pk, now=db_now())


def make_adapters(organization: Organization, alice: User) -> None:
    base_model = make_served_model("small", is_priced=False)
    for _ in range(5):
        make_version(organization, base_model)


def make_keys(organization: Organization, alice: User) -> None:
    for _ in range(5):
        make_key(organization, alice)


def make_notifications(organization: Organization, alice: User) -> None:
    for number in range(5):
        Notification.objects.create(organization=organization, user=alice, kind="job", title="t", path="/", key=number)


def make_invitations(organization: Organization, alice: User) -> None:
    for number in range(5):
        Invitation.objects.create(
            organization=organization, email=f"{number}@example.com", role="viewer", token_sha256=str(number),
            invited_by=alice, expires_at=db_now() + datetime.timedelta(hours=1),
        )  # fmt: skip


def make_jobs(organization: Organization, alice: User) -> None:
    floor = TrainingSetup(organization)
    for _ in range(5):
        floor.job()


def make_webhooks(client, organization: Organization, alice: User) -> None:
    sent = {"url": "https://hooks.example.com/a", "event_types": ["batch.completed"]}
    made = [client.post("/api/v1/webhooks", sent, format="json").json()["id"] for _ in range(3)]
    for webhook in [made[0], made[0], made[0], made[1]]:
        client.post(f"/api/v1/webhooks/{webhook}/test")


def make_limits(client, organization: Organization, alice: User) -> None:
    for name in "abc":
        target = {"scope": "label", "target": f"team={name}"}
        client.post("/api/v1/budgets", target | {"limit_usd": "5"}, format="json")
        client.post("/api/v1/allowances", target | {"queued_jobs": 3}, format="json")


def make_aliases(client, organization: Organization, alice: User, names: Sequence[str] = _NAMES) -> None:
    version = make_adapter(organization, make_served_model("small", is_priced=False))
    for name in names:
        Alias.objects.create(
            organization=organization, adapter=version.adapter, version=version, name=name, model_name=f"ft:{name}"
        )


def make_evals(client, organization: Organization, alice: User) -> None:
    sent = {"data_source_config": {"type": "logs"}, "testing_criteria": [GRADER]}
    for name in ("one", "two", "three"):
        client.post("/v1/evals", sent | {"name": name}, format="json")


def make_batches(client, organization: Organization, alice: User) -> None:
    for name in ("one", "two", "three"):
        make_batch(organization, alice, [make_line("1")], name=f"{name}.jsonl")


@pytest.mark.parametrize(
    ("make", "address", "one", "none"),
    [
        (make_webhooks, "/api/v1/webhooks", "", ""),
        (make_webhooks, "/api/v1/webhooks/{first}/deliveries", "", "status=failed event_type=batch.completed"),
        (make_limits, "/api/v1/budgets", "", ""),
        (make_limits, "/api/v1/allowances", "", ""),
        (make_aliases, "/api/v1/aliases", "q=two model=ft:two", "q=four model=two"),
        (make_evals, "/v1/evals", "q=two", "q=four"),
        (make_batches, "/v1/batches", "q=two", "q=four status=failed"),
    ],
)
def test_a_list_has_pages_and_filters(
    api_client, key, organization, alice, make, address: str, one: str, none: str
) -> None:
    client = api_client(key)
    make(client, organization, alice)
    first = client.get("/api/v1/webhooks").json()["first_id"]
    address = address.format(first=first)

    start = client.get(f"{address}?limit=2").json()
    end = client.get(f"{address}?limit=2&after={start['last_id']}").json()
    assert [start["has_more"], end["has_more"]] == [True, False]
    assert len({each["id"] for each in start["data"] + end["data"]}) == 3
    assert [len(client.get(f"{address}?{query}").json()["data"]) for query in one.split()] == [1] * len(one.split())
    assert [client.get(f"{address}?{query}").json()["data"] for query in none.split()] == [[]] * len(none.split())


def test_all_aliases_of_a_few_adapters_come_at_once(api_client, key, organization, alice) -> None:
    make_aliases(None, organization, alice, [str(number) for number in range(25)])

    assert len(api_client(key).get("/api/v1/aliases").json()["data"]) == 25


@pytest.mark.parametrize(
    ("make", "address", "change"),
    [
        (make_completions, "/v1/chat/completions?limit=2", "DELETE /v1/chat/completions/{id}"),
        (make_files, "/v1/files?limit=2", "DELETE /v1/files/{id}"),
        (make_files, "/v1/files?limit=1&order=asc&purpose=fine-tune", "DELETE /v1/files/{id}"),
        (make_files, "/api/v1/datasets?limit=1&status=ready", "DELETE /api/v1/datasets/{id}"),
        (make_adapters, "/api/v1/adapters?limit=2", "DELETE /api/v1/adapters/{id}"),
        (make_keys, "/api/v1/keys?limit=2&status=active", "DELETE /api/v1/keys/{id}"),
        (make_invitations, "/api/v1/invitations?limit=2", "DELETE /api/v1/invitations/{id}"),
        (make_notifications, "/api/v1/notifications?limit=2&is_read=false", "POST /api/v1/notifications"),
        (make_jobs, "/v1/fine_tuning/jobs?limit=2&status=queued", "POST /v1/fine_tuning/jobs/{id}/cancel"),
    ],
)
def test_a_client_deletes_or_changes_what_a_page_lists_and_then_asks_for_the_next(
    api_client, key, organization, alice, make, address: str, change: str
) -> None:
    make(organization, alice)
    client, (method, path) = api_client(key), change.split()
    wanted = {each["id"] for each in client.get(re.sub(r"limit=\d", "limit=9", address)).json()["data"]}
    seen, after = [], ""

    while True:
        found = client.get(f"{address}{after}").json()
        for each in found["data"]:
            seen.append(each["id"])
            if each["id"] != key.key.pk:  # the caller's own
                body = {"notification": each["id"]} if path.endswith("notifications") else {}
                changed = client.generic(method, path.format(id=each["id"]), json.dumps(body), "application/json")
                assert changed.status_code == 200, changed.content
        if not found["has_more"]:
            break
        after = f"&after={found['last_id']}"

    assert len(seen) == len(wanted) >= 3 and set(seen) == wanted
