"""Keys, members, invitations, budgets, limits, usage and notifications over the API, each as far as a key may go."""

import datetime

import pytest

from apps.accounts.login import key_operations
from apps.accounts.login.key_operations import issue_key
from apps.accounts.models import ApiKey, Invitation, Membership, Organization
from apps.accounts.notices.events import announce
from apps.accounts.queries import KeyLimits, find_actor
from apps.accounts.roles import SCOPES, Member
from apps.billing.budget_settings import set_budget, set_key_labels
from apps.billing.budgets import BudgetExceeded, attribution_of_key, list_key_labels
from apps.billing.models import Budget, TrafficHour
from apps.billing.usage.slices import lease_slice
from apps.core.database.clock import db_now
from apps.core.models import AuditEntry
from apps.interfaces.api import views
from tests.factories.accounts import make_key, make_member
from tests.factories.money import USD, give_credit, spend

MEMBER = frozenset({"view", "key.manage"})
HOUR = datetime.timedelta(hours=1)


def test_a_key_is_created_rotated_with_an_overlap_and_revoked(api_client, key, organization, alice):
    client = api_client(key)
    made = client.post("/api/v1/keys", {"name": "nightly", "scopes": ["view"], "requests_per_minute": 7}, format="json")
    old = made.json()
    set_key_labels(organization=organization, key_id=old["id"], labels={"team": "search"}, by="user_1")

    new = client.post(f"/api/v1/keys/{old['id']}/rotate", {"overlap_hours": 2}, format="json").json()

    both = [api_client(each["secret"]).get("/api/v1/me").status_code for each in (old, new)]
    assert both == [200, 200]
    assert (new["name"], new["scopes"], new["requests_per_minute"]) == ("nightly", ["view"], 7)
    assert (new["id"], "team=search") in list_key_labels(organization=organization)
    assert ApiKey.objects.get(pk=old["id"]).expires_at - db_now() <= 2 * HOUR

    ApiKey.objects.filter(pk=old["id"]).update(expires_at=db_now())
    assert api_client(old["secret"]).get("/api/v1/me").status_code == 401
    assert find_actor(organization=organization, actor=old["id"], now=db_now()), "its jobs and batches go on"
    revoked = client.delete(f"/api/v1/keys/{new['id']}").json()
    assert revoked["status"] == "revoked" and "secret" not in revoked
    assert api_client(new["secret"]).get("/api/v1/me").status_code == 401
    assert find_actor(organization=organization, actor=old["id"], now=db_now()) is None
    again = client.post(f"/api/v1/keys/{new['id']}/rotate", {}, format="json")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "key_not_active")
    entries = AuditEntry.objects.filter(actor=alice.pk, action__startswith="key.", target__in=[old["id"], new["id"]])
    assert {entry.action for entry in entries} == {"key.create", "key.rotate", "key.revoke"}
    assert {entry.details["api_key"] for entry in entries} == {key.key.pk}


def test_a_key_is_rotated_once_and_itself_only_with_an_overlap(api_client, organization, alice):
    first = make_key(organization, alice)

    def rotate(key_id: str, secret: str, hours: int = 24) -> dict:
        body = {"overlap_hours": hours}
        return api_client(secret).post(f"/api/v1/keys/{key_id}/rotate", body, format="json").json()

    at_once = rotate(first.key.pk, first.secret, 0)["error"]
    assert (at_once["code"], at_once["param"]) == ("invalid_value", "overlap_hours")
    second = rotate(first.key.pk, first.secret)
    again = rotate(first.key.pk, first.secret)["error"]
    assert again["code"] == "key_already_rotated" and second["id"] in again["message"]
    third = rotate(second["id"], second["secret"])
    assert (second["expires_at"], third["expires_at"]) == (None, None)
    for replaced in (first.key.pk, second["id"]):
        assert third["id"] in rotate(replaced, third["secret"])["error"]["message"], "the only one that may be rotated"

    ApiKey.objects.filter(pk=third["id"]).update(expires_at=db_now())
    last = rotate(first.key.pk, first.secret)["error"]
    assert (last["code"], last["message"]) == (
        "key_already_rotated", "This key was replaced already. Create another one.",
    )  # fmt: skip


def test_a_key_makes_no_key_that_can_do_more_or_lives_longer(api_client, organization, alice):
    soon = db_now() + HOUR
    narrow = issue_key(
        organization=organization, name="narrow", scopes=frozenset({"view", "key.manage"}), by=alice,
        expires_at=soon, now=db_now(),
    )  # fmt: skip
    wide = make_key(organization, alice)
    client = api_client(narrow)

    def refused(path: str, body: dict) -> tuple[int, str]:
        answer = client.post(path, body, format="json")
        return answer.status_code, answer.json()["error"]["param"]

    assert refused("/api/v1/keys", {"name": "a", "scopes": ["inference"], "expires_at": int(soon.timestamp())}) == (
        403, "scopes",
    )  # fmt: skip
    assert refused("/api/v1/keys", {"name": "a", "scopes": ["view"]}) == (403, "expires_at")
    assert refused("/api/v1/keys", {"name": "a", "scopes": ["view"], "expires_at": 0}) == (400, "expires_at")
    assert refused(f"/api/v1/keys/{wide.key.pk}/rotate", {}) == (403, "scopes")


def test_a_key_hands_on_its_limits_and_labels(api_client, organization, alice):
    limited = make_key(organization, alice, limits=KeyLimits(requests_per_minute=5))
    free = make_key(organization, alice)
    set_key_labels(organization=organization, key_id=limited.key.pk, labels={"team": "search"}, by="user_1")
    client, wish = api_client(limited), {"name": "a", "scopes": ["view"]}

    more = client.post("/api/v1/keys", {**wish, "requests_per_minute": 6}, format="json")
    assert (more.status_code, more.json()["error"]["param"]) == (403, "requests_per_minute")
    made = client.post("/api/v1/keys", {**wish, "tokens_per_minute": 9}, format="json").json()
    assert (made["requests_per_minute"], made["tokens_per_minute"]) == (5, 9)
    assert (made["id"], "team=search") in list_key_labels(organization=organization)
    assert client.post(f"/api/v1/keys/{free.key.pk}/rotate", {}, format="json").status_code == 403


def test_a_key_cannot_leave_its_budget(api_client, organization, alice):
    give_credit(organization)
    mine, other = make_key(organization, alice), make_key(organization, alice)
    budget = set_budget(
        organization=organization, scope="key", target=mine.key.pk, limit_nano=10 * USD, mode="block", by=alice.pk,
        now=db_now(),
    )  # fmt: skip
    client = api_client(mine)

    made = client.post("/api/v1/keys", {"name": "a", "scopes": ["view"]}, format="json")
    assert made.status_code == 403 and "budget" in made.json()["error"]["message"]
    assert client.post(f"/api/v1/keys/{other.key.pk}/rotate", {}, format="json").status_code == 403
    assert ApiKey.objects.count() == 2

    new = client.post(f"/api/v1/keys/{mine.key.pk}/rotate", {}, format="json").json()
    newest = api_client(new["secret"]).post(f"/api/v1/keys/{new['id']}/rotate", {}, format="json").json()
    for number, key_id in enumerate((mine.key.pk, new["id"], newest["id"])):
        whose = attribution_of_key(organization=organization, key_id=key_id)
        spend(organization, 3 * USD, f"ftjob-{number}", attribution=whose)
    with pytest.raises(BudgetExceeded):
        lease_slice(organization=organization, required_nano=2 * USD, by="gateway_1", key_id=mine.key.pk)
    lease_slice(organization=organization, required_nano=USD, by="gateway_1", key_id=newest["id"])
    with pytest.raises(BudgetExceeded):
        lease_slice(organization=organization, required_nano=1, by="gateway_1", key_id=new["id"])
    assert api_client(newest["secret"]).get("/api/v1/budgets").json()["data"][0]["spent_usd"] == "9"

    again = set_budget(
        organization=organization, scope="key", target=newest["id"], limit_nano=USD, mode="block", by="user_1",
        now=db_now(),
    )  # fmt: skip
    assert again.pk == budget.pk and Budget.objects.count() == 1


def test_a_key_is_revoked_with_what_was_made_with_it(api_client, organization, alice):
    top = make_key(organization, alice)

    def made_with(secret: str) -> dict:
        wish = {"name": "a", "scopes": ["view", "key.manage"]}
        return api_client(secret).post("/api/v1/keys", wish, format="json").json()

    child = made_with(top.secret)
    grandchild = made_with(child["secret"])
    new = api_client(top).post(f"/api/v1/keys/{top.key.pk}/rotate", {}, format="json").json()
    of_new = made_with(new["secret"])

    assert api_client(new["secret"]).delete(f"/api/v1/keys/{top.key.pk}").json()["status"] == "revoked"

    alive = set(ApiKey.objects.filter(revoked_at=None).values_list("pk", flat=True))
    assert alive == {new["id"], of_new["id"]} and grandchild["id"] not in alive
    key_operations.revoke_key(organization=organization, key_id=new["id"], by=alice, now=db_now())
    assert not ApiKey.objects.filter(revoked_at=None).exists()


def test_a_key_revokes_only_keys_within_its_scopes(api_client, organization, alice, bob):
    narrow = make_key(organization, alice, scopes=frozenset({"key.manage", "view"}))
    manager = make_key(organization, alice, scopes=frozenset({"key.manage", "member.manage"}))
    theirs, wide = make_key(organization, bob, scopes=frozenset({"view"})), make_key(organization, alice)

    def status(with_key, other) -> int:
        return api_client(with_key).delete(f"/api/v1/keys/{other.key.pk}").status_code

    assert [status(narrow, theirs), status(narrow, wide), status(manager, wide)] == [403, 403, 403]
    assert [status(manager, theirs), status(wide, manager), status(narrow, narrow)] == [200, 200, 200]


def test_only_the_creator_of_a_key_rotates_it(api_client, organization, alice):
    bob = make_member(organization, "member")
    theirs = make_key(organization, bob, scopes=frozenset({"view"}))

    answer = api_client(make_key(organization, alice)).post(f"/api/v1/keys/{theirs.key.pk}/rotate", {}, format="json")

    assert answer.status_code == 403 and "Only the creator" in answer.json()["error"]["message"]


def test_members_and_invitations_follow_the_role_of_the_creator(api_client, key, organization, alice):
    bob = make_member(organization, "admin")
    admin = api_client(make_key(organization, bob, scopes=frozenset(SCOPES) - {"organization.manage"}))
    listed = admin.get("/api/v1/members?role=owner").json()["data"]
    assert [each["user"] for each in listed] == [alice.pk]

    assert admin.post(f"/api/v1/members/{listed[0]['id']}", {"role": "viewer"}, format="json").status_code == 403
    assert admin.delete(f"/api/v1/members/{listed[0]['id']}").status_code == 403
    wanted = {"email": "new@example.com", "role": "member"}
    asked = api_client(key).post("/api/v1/invitations", wanted, format="json").json()
    assert [each["id"] for each in admin.get("/api/v1/invitations").json()["data"]] == [asked["id"]]
    assert admin.delete(f"/api/v1/invitations/{asked['id']}").json()["deleted"]
    assert Invitation.objects.get(pk=asked["id"]).revoked_at

    mine = api_client(key).get(f"/api/v1/members?q={bob.email}").json()["data"][0]
    changed = api_client(key).post(f"/api/v1/members/{mine['id']}", {"role": "viewer"}, format="json").json()
    assert changed["role"] == "viewer"
    assert api_client(key).delete(f"/api/v1/members/{mine['id']}").json()["deleted"]
    assert admin.get("/api/v1/me").status_code == 401


def test_a_key_manages_only_roles_within_its_scopes(api_client, organization, alice, ann, bob):
    scopes = frozenset({"view", "member.manage", *Member.permissions})
    client = api_client(make_key(organization, alice, scopes=scopes))
    ids = dict(Membership.objects.values_list("user_id", "pk"))

    def changed(user, role: str) -> int:
        return client.post(f"/api/v1/members/{ids[user.pk]}", {"role": role}, format="json").status_code

    def invited(role: str) -> int:
        body = {"email": f"{role}@example.com", "role": role}
        return client.post("/api/v1/invitations", body, format="json").status_code

    assert [changed(bob, "owner"), changed(bob, "admin"), changed(ann, "viewer"), invited("owner")] == [403] * 4
    assert [client.delete(f"/api/v1/members/{ids[user.pk]}").status_code for user in (alice, ann)] == [403, 403]
    sent = api_client(make_key(organization, alice)).post(
        "/api/v1/invitations", {"email": "new@example.com", "role": "owner"}, format="json"
    )
    assert client.delete(f"/api/v1/invitations/{sent.json()['id']}").status_code == 403
    assert [changed(bob, "viewer"), invited("member")] == [200, 200]
    assert client.delete(f"/api/v1/members/{ids[bob.pk]}").status_code == 200


def test_budgets_are_set_and_ended(api_client, key):
    client = api_client(key)
    body = {"limit_usd": "250.00", "mode": "block", "thresholds": [100, 80]}
    made = client.post("/api/v1/budgets", body, format="json").json()
    assert (made["limit_usd"], made["spent_usd"], made["thresholds"]) == ("250", "0", [80, 100])
    assert client.get("/api/v1/budgets").json()["data"] == [made]
    assert client.delete(f"/api/v1/budgets/{made['id']}").json()["deleted"]
    assert client.get(f"/api/v1/budgets/{made['id']}").status_code == 404


@pytest.fixture
def hours(organization) -> list[TrafficHour]:
    begin = db_now().replace(minute=0, second=0, microsecond=0)
    counts = ("aborted", "rate_limited", "over_quota", "not_found", "invalid", "failed", "cached_input_tokens")
    return [
        TrafficHour.objects.create(
            organization=organization, model_name="tiny", key_id=f"key_{number % 2}", hour_at=begin - number * HOUR,
            requests=10 + number, input_tokens=5, output_tokens=6, cost_nano=7,
            first_token_counts=[], latency_counts=[], **dict.fromkeys(counts, 0),
        )
        for number in range(5)
    ]  # fmt: skip


def test_usage_is_paged_by_hour_key_and_model(api_client, key, hours, rival, charlie):
    client, seen, after = api_client(key), [], ""
    while True:
        answer = client.get(f"/api/v1/usage?limit=2{after}").json()
        seen += [each["requests"] for each in answer["data"]]
        if not answer["has_more"]:
            break
        after = f"&after={answer['last_id']}"
    assert seen == [10, 11, 12, 13, 14]
    of_one = client.get("/api/v1/usage?key=key_1&model=tiny").json()["data"]
    assert [each["requests"] for each in of_one] == [11, 13] and of_one[0]["cost_usd"] == "0.000000007"
    since = int(hours[1].hour_at.timestamp())
    assert [each["requests"] for each in client.get(f"/api/v1/usage?start_time={since}").json()["data"]] == [10, 11]
    assert client.get("/api/v1/usage?after=nothing").json()["error"]["param"] == "after"
    assert client.get("/api/v1/usage?start_time=9&end_time=8").json()["error"]["param"] == "start_time"
    assert api_client(make_key(rival, charlie)).get("/api/v1/usage").json()["data"] == []


def test_limits_say_what_is_used_and_left(api_client, key, organization):
    found = {each["id"]: each for each in api_client(key).get("/api/v1/quotas").json()["data"]}

    assert found["queued_jobs"]["used"] == 0 and found["storage_bytes"]["used"] == 0
    assert found["queued_jobs"]["available"] == found["queued_jobs"]["limit"]
    assert found["requests_per_minute"]["used"] is None
    assert (found["gpu_seconds_per_month"]["held"], found["requests_per_minute"]["held"]) == (0, None)


def test_allowances_are_set_within_the_quota_and_ended(api_client, key, organization, alice, bob, rival, charlie):
    client, path = api_client(key), "/api/v1/allowances"
    body = {"scope": "member", "target": alice.pk, "concurrent_gpus": 1}

    above = client.post(path, body | {"concurrent_gpus": 10**6}, format="json").json()["error"]
    assert (above["code"], above["param"]) == ("invalid_value", "concurrent_gpus") and "operator" in above["message"]
    made = client.post(path, body, format="json").json()
    assert made["concurrent_gpus"] == {"limit": 1, "used": 0, "held": 0, "available": 1}
    assert made["queued_jobs"]["limit"] is None and made["last_30_days"]["gpu_seconds"] == 0
    assert client.get(path).json()["data"] == [made] == [client.get(f"{path}/{made['id']}").json()]
    rates = client.post(path, body | {"requests_per_minute": 60, "tokens_per_minute": 9}, format="json").json()
    assert rates["requests_per_minute"] == {"limit": 60, "used": None, "held": None, "available": None}
    assert (rates["id"], rates["tokens_per_minute"]["limit"]) == (made["id"], 9)
    stored = client.post(path, body | {"storage_bytes": 500}, format="json").json()
    assert stored["storage_bytes"] == {"limit": 500, "used": 0, "held": 0, "available": 500}
    assert stored["last_30_days"]["stored_bytes"] == 0
    used = ("requests", "most_requests_of_hour", "tokens", "most_tokens_of_hour")
    assert [rates["last_30_days"][name] for name in used] == [0] * 4
    member = api_client(make_key(organization, bob, scopes=frozenset({"view"})))
    outsider = api_client(make_key(rival, charlie))
    assert member.get(path).json()["data"] == [stored]
    assert member.post(path, body, format="json").status_code == 403
    assert outsider.get(path).json()["data"] == [] and outsider.get(f"{path}/{made['id']}").status_code == 404
    assert api_client().get(path).status_code == 401
    assert client.delete(f"{path}/{made['id']}").json()["deleted"]
    assert client.get(f"{path}/{made['id']}").status_code == 404


def test_notifications_are_those_of_the_creator(api_client, key, organization, alice):
    bob = make_member(organization, "member")
    for person in (alice, bob):
        announce(
            organization=organization, type="fine_tuning.job.succeeded", subject="ftjob-1", title=lambda: "It ended",
            path="/jobs", key=person.pk, users=[person.pk],
        )  # fmt: skip
    client = api_client(key)

    unread = client.get("/api/v1/notifications?is_read=false").json()["data"]
    assert len(unread) == 1
    assert client.post("/api/v1/notifications", {"notification": unread[0]["id"]}, format="json").json()["marked"] == 1
    assert client.get("/api/v1/notifications?is_read=false&kind=job").json()["data"] == []
    assert client.get("/api/v1/notifications?kind=webhook").json()["data"] == []


def test_a_key_is_renamed_limited_and_labelled(api_client, key, organization, alice, bob, rival, charlie):
    client = api_client(key)
    made = client.post("/api/v1/keys", {"name": "nightly", "scopes": ["view"], "tokens_per_minute": 9}, format="json")
    place = f"/api/v1/keys/{made.json()['id']}"

    sent = {"name": "weekly", "requests_per_minute": 5, "tokens_per_minute": None}
    changed = client.post(place, sent, format="json").json()
    assert (changed["name"], changed["requests_per_minute"], changed["tokens_per_minute"]) == ("weekly", 5, None)
    assert client.post(place, {}, format="json").json()["requests_per_minute"] == 5
    labelled = client.put(f"{place}/labels", {"labels": {"team": " search "}}, format="json").json()
    assert labelled["labels"] == {"team": "search"}
    assert {each["id"]: each["labels"] for each in client.get("/api/v1/keys").json()["data"]} == {
        made.json()["id"]: {"team": "search"}, key.key.pk: {},
    }  # fmt: skip
    for labels in ({"team": " "}, {"team": "search", "team ": "ads"}):
        refused = client.put(f"{place}/labels", {"labels": labels}, format="json").json()
        assert refused["error"]["param"] == "labels"
    entries = AuditEntry.objects.filter(target=made.json()["id"], action__in=["key.change", "key.labelled"])
    assert [entry.action for entry in entries.order_by("pk")] == ["key.change", "key.labelled"]

    limited = make_key(organization, bob, scopes=MEMBER, limits=KeyLimits(3))
    own = f"/api/v1/keys/{limited.key.pk}"
    above = api_client(limited).post(own, {"requests_per_minute": 4}, format="json")
    assert (above.status_code, above.json()["error"]["param"]) == (403, "requests_per_minute")
    kept = api_client(limited).post(own, {"requests_per_minute": None}, format="json").json()
    assert kept["requests_per_minute"] == 3
    lead = api_client(make_key(organization, alice, limits=KeyLimits(3)))
    assert lead.post(place, {"name": "monthly"}, format="json").json()["requests_per_minute"] == 5
    assert api_client(limited).post(place, {"name": "mine"}, format="json").status_code == 403
    assert api_client(limited).put(f"{place}/labels", {"labels": {}}, format="json").status_code == 403
    assert api_client(make_key(rival, charlie)).post(place, {"name": "mine"}, format="json").status_code == 404
    assert api_client().post(place, {"name": "mine"}, format="json").status_code == 401
    client.delete(place)
    assert client.post(place, {"name": "late"}, format="json").json()["error"]["code"] == "key_not_active"


def test_the_organization_is_renamed_by_its_owners_only(api_client, key, organization, bob, monkeypatch):
    renamed = api_client(key).post("/api/v1/organization", {"name": "Acme  Inc"}, format="json").json()

    assert (renamed["name"], renamed["slug"], renamed["requires_second_factor"]) == ("Acme Inc", "acme", False)
    member = api_client(make_key(organization, bob, scopes=MEMBER))
    assert member.get("/api/v1/organization").json() == renamed
    assert member.post("/api/v1/organization", {"name": "Bob"}, format="json").status_code == 403
    assert api_client().get("/api/v1/organization").status_code == 401
    read = {"If-Match": member.get("/api/v1/organization").headers["ETag"]}
    monkeypatch.setattr(views, "lock", lambda _: Organization.objects.update(name="Theirs"))  # while it waits
    late = api_client(key).post("/api/v1/organization", {"name": "Mine"}, format="json", headers=read)
    assert late.status_code == 412


def test_a_change_of_what_was_changed_meanwhile_is_refused(api_client, key, organization, alice):
    """RFC 9110, 13.1.1: without the check, two people who edit the same object overwrite each other."""
    client, other = api_client(key), make_key(organization, alice)
    place = f"/api/v1/keys/{other.key.pk}"
    etag = client.get(place).headers["ETag"]
    ApiKey.objects.filter(pk=other.key.pk).update(last_used_at=db_now() - HOUR)
    assert client.get(place, headers={"If-None-Match": etag}).status_code == 200

    def change(etag: str, name: str, **headers: str):
        return client.post(place, {"name": name}, format="json", headers={"If-Match": etag} | headers)

    once = {"Idempotency-Key": "once"}
    assert change(etag, "first", **once).status_code == 200
    assert change(etag, "first", **once).headers["Idempotent-Replayed"] == "true"
    late = change(etag, "second")
    assert (late.status_code, late.json()["error"]["code"]) == (412, "precondition_failed")
    assert client.get(place).json()["name"] == "first"
    assert client.delete(place, headers={"If-Match": etag}).status_code == 412
    assert change(f'"x", {client.get(place).headers["ETag"]}', "third").json()["name"] == "third"
    assert change("*", "fourth").json()["name"] == "fourth"
    assert change("no quotes", "fifth").json()["error"]["param"] == "If-Match"
    unread = client.put(f"{place}/labels", {"labels": {}}, format="json", headers={"If-Match": "*"})
    assert (unread.status_code, unread.json()["error"]["param"]) == (400, "If-Match")


def test_an_answer_that_the_client_has_is_not_sent_again(api_client, key, organization, alice):
    client = api_client(key)
    first = client.get("/api/v1/keys")
    again = client.get("/api/v1/me", headers={"If-None-Match": client.get("/api/v1/me").headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    for condition in ({"If-Match": '"other"'}, {"If-Unmodified-Since": "Mon, 01 Jan 2024 00:00:00 GMT"}):
        assert client.get("/api/v1/me", headers=condition).status_code == 200

    make_key(organization, alice)
    changed = client.get("/api/v1/keys", headers={"If-None-Match": first.headers["ETag"]})
    assert changed.status_code == 200 and len(changed.json()["data"]) == 2
