"""Reading the audit log: filters, pages, exports, and whose entries are shown to whom."""

import csv
import io
import json

import pytest
from django.db import transaction

from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.models import AuditEntry
from tests.factories.accounts import make_key
from tests.factories.datasets import make_ready_version


def note(organization, by, action="thing.done", target="x_1", **details):
    with transaction.atomic():
        audit.record(organization=organization, by=by, action=action, target=target, **details)


def actions(page) -> list[str]:
    return [row["entry"].action for row in page.context["rows"]]


@pytest.mark.parametrize(("who", "status"), [("alice", 200), ("ann", 200), ("bob", 403), ("vera", 403)])
def test_owners_and_admins_read_it(who, status, organization, request, client_for):
    browser = client_for(request.getfixturevalue(who))

    assert browser.get("/organization/audit").status_code == status
    assert ("/organization/audit" in browser.get("/organization").content.decode()) is (status == 200)


def test_it_shows_the_organizations_own_entries_alone(organization, rival, alice, charlie, olga, client_for):
    note(organization, alice.pk, "ours.done")
    note(rival, charlie.pk, "theirs.done")
    note(None, olga.pk, "platform.done")
    note(organization, olga.pk, "credit.given")

    page = client_for(alice).get("/organization/audit")
    platform = client_for(olga).get("/staff/audit")
    of_rival = client_for(olga).get("/staff/audit", {"organization": rival.pk})

    assert set(actions(page)) == {"organization.create", "ours.done", "credit.given"}
    assert actions(platform) == ["platform.done"]
    assert set(actions(of_rival)) == {"organization.create", "theirs.done"}
    assert olga.name not in page.content.decode() and "Operator" in page.content.decode()


def test_ids_lead_to_their_pages_unless_they_were_deleted(organization, alice, client_for):
    for action, target in (("job.created", "ftjob-01"), ("dataset.deleted", "file-01"), ("key.create", "key_01")):
        note(organization, alice.pk, action, target)

    page = client_for(alice).get("/organization/audit")

    assert {row["entry"].target: row["url"] for row in page.context["rows"]} == {
        "ftjob-01": "/jobs/ftjob-01", "file-01": "", "key_01": "", organization.pk: "",
    }  # fmt: skip
    assert 'href="/jobs/ftjob-01"' in page.content.decode()


def test_details_are_words_and_amounts(organization, alice, client_for):
    details = {"limit_nano": 2_500_000_000, "spend_cap": None, "of": "", "scopes": ["view", "job.write"], "paid": True}
    note(organization, alice.pk, **details, changes={"role": "admin", "until": None})

    row = client_for(alice).get("/organization/audit").context["rows"][0]

    assert dict(row["details"]) == {
        "limit": "$2.50",
        "spend cap": "not set",
        "of": "not set",
        "scopes": "view, job.write",
        "paid": "yes",
        "changes": "role admin, until not set",
    }


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"action": "key.create"}, ["key.create"]),
        ({"action": "key."}, ["key.revoke", "key.create"]),
        ({"actor": "key_2"}, ["file.read"]),
        ({"target": "file_1"}, ["file.read"]),
        ({"since": "2020-01-01", "until": "2020-01-02"}, []),
        ({"since": "2020-01-01", "action": "key.revoke"}, ["key.revoke"]),
        ({"action": "key.%"}, []),
    ],
)
def test_filters(query, found, organization, alice, client_for, api_client):
    note(organization, alice.pk, "key.create", "key_1")
    note(organization, alice.pk, "key.revoke", "key_1")
    note(organization, "key_2", "file.read", "file_1")
    key = make_key(organization, alice)
    asked = {**query, "limit": "100"}

    page = client_for(alice).get("/organization/audit", query)
    answer = api_client(key).get("/api/v1/audit", asked).json()

    own = {"target": key.key.pk}
    assert [action for row, action in zip(page.context["rows"], actions(page), strict=True)
            if row["entry"].target != own["target"]] == found  # fmt: skip
    assert [entry["action"] for entry in answer["data"] if entry["target"] != own["target"]] == found


def test_the_last_day_of_the_form_is_included_and_a_moment_of_the_api_is_not(
    organization, alice, olga, client_for, api_client
):
    note(organization, alice.pk)
    asked = {"action": "thing.done", "until": f"{db_now():%Y-%m-%d}"}

    page = client_for(alice).get("/organization/audit", asked)
    platform = client_for(olga).get("/staff/audit", asked | {"organization": organization.pk})
    exported = b"".join(client_for(alice).get("/organization/audit/export", asked))
    answer = api_client(make_key(organization, alice)).get("/api/v1/audit", asked).json()

    assert actions(page) == actions(platform) == ["thing.done"] and b"thing.done" in exported
    assert answer["data"] == [] and page.context["asked"]["until"] == asked["until"]
    assert client_for(alice).get("/organization/audit", asked | {"until": "9999-12-31"}).status_code == 200


@pytest.mark.parametrize(
    "query",
    [{"since": "yesterday"}, {"until": "2026-13-40"}, {"after": "-1"}, {"after": "9" * 40}, {"after": "abc"}],
)
def test_a_filter_that_cannot_be_read_is_named(query, organization, alice, key, client_for, api_client):
    page = client_for(alice).get("/organization/audit", query)
    answer = api_client(key).get("/api/v1/audit", query)

    (name,) = query
    assert page.status_code == 422 and f"&#x27;{name}&#x27;" in page.content.decode()
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_pages_by_key_miss_nothing_while_entries_come_in(organization, alice, key, api_client, client_for):
    for number in range(60):
        note(organization, alice.pk, f"act.{number:02}")
    wanted = list(AuditEntry.objects.filter(organization=organization).order_by("-id").values_list("pk", flat=True))

    first = api_client(key).get("/api/v1/audit", {"limit": "40"}).json()
    note(organization, alice.pk, "act.later")
    second = api_client(key).get("/api/v1/audit", {"limit": "40", "after": first["last_id"]}).json()
    page = client_for(alice).get("/organization/audit")
    rest = client_for(alice).get("/organization/audit" + page.context["older"])

    assert [int(entry["id"]) for entry in first["data"] + second["data"]] == wanted
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert len(page.context["rows"]) == 50 and actions(page)[0] == "act.later"
    assert len(actions(page)) + len(actions(rest)) == len(wanted) + 1


def test_exports_hold_what_matches_and_no_formula(organization, alice, client_for, api_client, key):
    note(organization, alice.pk, "thing.done", "=1+1", name="x")
    browser = client_for(alice)

    as_csv = b"".join(browser.get("/organization/audit/export", {"export": "csv", "action": "thing."})).decode()
    as_lines = api_client(key).get("/api/v1/audit", {"export": "jsonl", "action": "thing."}).content.decode()

    (row,) = csv.DictReader(io.StringIO(as_csv))
    assert (row["actor"], row["target"], row["details"]) == (alice.pk, "'=1+1", '{"name": "x"}')
    assert [json.loads(line)["target"] for line in as_lines.splitlines()] == ["=1+1"]
    assert AuditEntry.objects.filter(action="audit.exported").count() == 2
    assert browser.get("/organization/audit/export", {"export": "xls"}).status_code == 400
    assert api_client(key).get("/api/v1/audit", {"export": "xls"}).json()["error"]["param"] == "export"


def test_a_key_needs_the_scope_and_its_creator_the_right(organization, bob, alice, api_client):
    without = make_key(organization, alice, scopes=frozenset({"view"}))

    assert api_client(without).get("/api/v1/audit").status_code == 403


def test_a_download_by_the_api_is_audited(organization, alice, key, api_client):
    version = make_ready_version(organization, by=alice.pk)

    response = api_client(key).get(f"/v1/files/{version.pk}/content", REMOTE_ADDR="203.0.113.9")

    assert response.status_code == 200 and b"".join(response.streaming_content)
    entry = AuditEntry.objects.get(action="dataset.downloaded")
    assert (entry.actor, entry.target, entry.ip) == (key.key.pk, version.pk, "203.0.113.9")
