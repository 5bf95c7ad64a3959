"""Effects after commit: once, in order, and again until they work."""

import datetime
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connection, transaction

from apps.accounts.models import Organization
from apps.core.audit import NoTransaction
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.core.messages import outbox
from apps.core.messages.topics import CONTROL, Topic
from apps.core.models import OutboxMessage
from apps.core.tasks import carry_out as carry_out_next
from apps.core.tasks import wake_lanes

delivered: list[tuple[str, dict[str, Any]]] = []
woken: list[str] = []


def carry_out(*, name: str, fails: bool = False, raises: bool = False, is_slow: bool = False, **payload: Any) -> None:
    if is_slow:
        raise SoftTimeLimitExceeded
    if fails:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")  # breaks its own transaction, not the delivery's
    if raises:
        raise ZeroDivisionError("division by zero")
    delivered.append((name, payload))


def wake(lane: str) -> None:
    woken.append(lane)


@pytest.fixture(autouse=True)
def _topics(settings: Any, db: None) -> None:
    topic = Topic(f"{__name__}.carry_out")
    settings.OUTBOX_TOPICS = {
        "test": topic,
        "slow": topic._replace(lane="aside"),
        "urgent": topic._replace(is_urgent=True),
        "waiting": topic._replace(lane="aside", waits_while_suspended=True),
    }
    settings.OUTBOX_WAKE = f"{__name__}.wake"
    delivered.clear()
    woken.clear()


def publish(key: str, topic: str = "test", organization: str | None = None, **payload: Any) -> None:
    with transaction.atomic():
        outbox.publish(topic=topic, key=key, payload={"name": key} | payload, organization=organization)


def delivered_keys() -> list[str]:
    return [key for key, _ in delivered]


def test_messages_are_delivered_once_and_in_order() -> None:
    publish("a", n=1)
    publish("b", n=2)

    assert outbox.deliver_due() == 2
    assert outbox.deliver_due() == 0
    assert delivered == [("a", {"n": 1}), ("b", {"n": 2})]


def test_the_same_key_is_the_same_effect() -> None:
    publish("a", n=1)
    publish("a", n=2)

    outbox.deliver_due()

    assert delivered == [("a", {"n": 1})]


def test_a_failing_task_is_tried_again_later_and_stops_nobody_else() -> None:
    publish("bad", fails=True)
    publish("good")

    outbox.deliver_due()

    message = OutboxMessage.objects.get(key="bad")
    assert [key for key, _ in delivered] == ["good"]
    assert (message.attempts, message.sent_at) == (1, None)
    assert message.next_attempt_at > db_now()
    assert "division by zero" in message.last_error


def test_the_wait_doubles_up_to_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    publish("bad", fails=True)
    now, waits = db_now(), []
    monkeypatch.setattr(outbox, "db_now", lambda: now)
    for _ in range(14):
        OutboxMessage.objects.update(next_attempt_at=now)
        outbox.deliver_due(limit=1)
        waits.append((OutboxMessage.objects.get().next_attempt_at - now).total_seconds())

    assert waits[:4] == [2, 4, 8, 16]
    assert waits[-1] == 3600


def test_a_message_is_never_given_up_and_shows_as_stuck(caplog: pytest.LogCaptureFixture) -> None:
    publish("bad", fails=True)
    OutboxMessage.objects.update(attempts=20_000)

    outbox.deliver_due()

    message = OutboxMessage.objects.get()
    assert message.attempts == 20_001
    assert message.next_attempt_at - db_now() < datetime.timedelta(hours=1, minutes=1)
    assert outbox.list_failing() == [message]
    assert f"outbox message {message.pk} (test) failed" in caplog.text
    assert "division by zero" not in caplog.text


def test_what_was_sent_long_ago_is_pruned() -> None:
    for key in ("old", "new"):
        publish(key)
    publish("bad", fails=True)
    outbox.deliver_due()
    OutboxMessage.objects.filter(key="old").update(sent_at=db_now() - datetime.timedelta(days=8))
    OutboxMessage.objects.filter(key="bad").update(created_at=db_now() - datetime.timedelta(days=800))

    assert outbox.prune(now=db_now()) == 1
    assert set(OutboxMessage.objects.values_list("key", flat=True)) == {"new", "bad"}


def test_an_unknown_topic_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="no task"), transaction.atomic():
        outbox.publish(topic="typo", key="a", payload={})


def test_a_tenant_may_publish(organization: Organization) -> None:
    with tenant(organization=organization):
        outbox.publish(topic="test", key="a", payload={"name": "a"})

    assert OutboxMessage.objects.get().share == organization.pk
    assert outbox.deliver_due() == 1


@pytest.mark.parametrize("topic", ["test", "slow"])
def test_a_thousand_messages_of_one_organization_delay_anothers_by_one(topic: str) -> None:
    for number in range(50):
        publish(f"many{number}", topic, "org_many")
    publish("few", topic, "org_few")
    publish("urgent", "urgent", "org_many")

    for _ in range(3):
        outbox.deliver_due(lane=outbox.CONTROL if topic == "test" else "aside", limit=1)

    expected = ["urgent", "few", "many0"] if topic == "test" else ["many0", "few", "many1"]
    assert delivered_keys() == expected


def test_turns_are_remembered_from_one_delivery_to_the_next() -> None:
    publish("a1", organization="org_a")
    outbox.deliver_due()
    publish("a2", organization="org_a")
    publish("b1", organization="org_b")

    outbox.deliver_due(limit=1)

    assert delivered_keys() == ["a1", "b1"]


def test_a_turn_of_long_ago_is_forgotten_and_a_recent_one_counts() -> None:
    publish("a", organization="org_a")
    publish("b", organization="org_b")
    outbox.deliver_due()
    publish("a again", organization="org_a")
    publish("b again", organization="org_b")
    long_ago, recently = (db_now() - outbox._TURNS_KEPT + datetime.timedelta(minutes=by) for by in (-1, 1))

    OutboxMessage.objects.filter(key="a").update(taken_at=recently)
    OutboxMessage.objects.filter(key="b").update(taken_at=db_now())
    first = outbox._in_turn("control", 1)
    OutboxMessage.objects.filter(key="b").update(taken_at=long_ago)
    after = outbox._in_turn("control", 1)

    keys = dict(OutboxMessage.objects.values_list("pk", "key"))
    assert [keys[pk] for pk in first + after] == ["a again", "b again"]
    OutboxMessage.objects.filter(key="a").update(taken_at=long_ago - datetime.timedelta(hours=1))
    assert outbox._in_turn("control", 1) == first, "both are forgotten, so the older message is next"


def test_a_lane_is_delivered_by_its_own_worker_alone() -> None:
    publish("mail", "slow")
    publish("work")

    assert outbox.deliver_due(lane=outbox.CONTROL) == 1
    assert delivered_keys() == ["work"]
    assert outbox.deliver_due(lane="aside") == 1


def test_the_lanes_with_due_messages_are_woken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    publish("work")
    wake_lanes()
    assert woken == []

    publish("bad", "slow", raises=True)
    wake_lanes()
    assert woken == ["aside"]

    outbox.deliver_due(lane="aside")  # fails, so it waits
    wake_lanes()
    assert woken == ["aside"]
    later = db_now() + datetime.timedelta(seconds=5)
    monkeypatch.setattr(outbox, "db_now", lambda: later)
    wake_lanes()
    assert woken == ["aside", "aside"]


def test_after_each_message_its_lane_is_woken_until_it_is_empty() -> None:
    publish("one", "slow")
    publish("two", "slow")

    for _ in range(3):
        carry_out_next(lane="aside")

    assert (delivered_keys(), woken) == (["one", "two"], ["aside", "aside"])


def test_what_is_being_carried_out_is_not_due_until_its_worker_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    publish("long", "slow")
    [message] = OutboxMessage.objects.all()
    assert outbox._claim(message.pk) is not None

    assert outbox.deliver_due(lane="aside") == 0
    later = db_now() + outbox.CLAIM
    monkeypatch.setattr(outbox, "db_now", lambda: later)
    assert outbox.deliver_due(lane="aside") == 1


def test_of_two_workers_of_a_lane_one_is_left_to_other_organizations() -> None:
    for key, owner in (("a1", "org_a"), ("a2", "org_a"), ("b1", "org_b")):
        publish(key, "slow", organization=owner)
    first, second = OutboxMessage.objects.filter(share="org_a").order_by("pk")
    assert outbox._claim(first.pk) is not None

    assert outbox._claim(second.pk) is None  # chosen before the first was claimed
    assert outbox.deliver_due(lane="aside") == 1
    assert delivered_keys() == ["b1"]
    OutboxMessage.objects.filter(pk=first.pk).update(sent_at=db_now())
    assert outbox.deliver_due(lane="aside") == 1
    assert delivered_keys() == ["b1", "a2"]


def test_a_lane_with_a_limit_leaves_workers_to_the_lane_beside_it(settings: Any) -> None:
    settings.OUTBOX_MOST_AT_ONCE = {"aside": 2}
    for number in range(4):
        publish(f"m{number}", "slow", organization=f"org_{number}")
    first, second, third, _ = OutboxMessage.objects.order_by("pk")
    assert outbox._claim(first.pk) is not None and outbox._claim(second.pk) is not None

    assert outbox._claim(third.pk) is None  # chosen before the others were claimed
    assert outbox.deliver_due(lane="aside") == 0
    OutboxMessage.objects.filter(pk=first.pk).update(sent_at=db_now())
    assert outbox.deliver_due(lane="aside", limit=1) == 1
    assert delivered_keys() == ["m2"]


def test_a_message_that_failed_does_not_keep_its_organization_from_its_next() -> None:
    publish("bad", "slow", organization="org_a", raises=True)
    publish("good", "slow", organization="org_a")

    assert outbox.deliver_due(lane="aside") == 1
    assert delivered_keys() == ["good"]


def test_a_claim_is_kept_while_the_work_goes_on() -> None:
    publish("long", "slow")
    [message] = OutboxMessage.objects.all()
    outbox._claim(message.pk)
    OutboxMessage.objects.update(next_attempt_at=db_now())

    outbox._renew(OutboxMessage.objects.filter(pk=message.pk))

    assert outbox.deliver_due(lane="aside") == 0


def test_a_message_that_kills_its_workers_is_taken_ever_less_often() -> None:
    publish("deadly", "slow")
    [message] = OutboxMessage.objects.all()
    waits = []
    for attempts in (0, 6, 20):
        OutboxMessage.objects.update(attempts=attempts, next_attempt_at=db_now())
        claimed = outbox._claim(message.pk)
        assert claimed is not None and claimed.taken_at is not None
        waits.append((claimed.next_attempt_at - claimed.taken_at).total_seconds())

    assert waits == [60, 128, 3600]


def test_long_work_that_fails_is_tried_again_later() -> None:
    publish("bad", "slow", raises=True)

    assert outbox.deliver_due(lane="aside") == 0

    message = OutboxMessage.objects.get()
    assert (message.sent_at, message.attempts) == (None, 1)
    assert "division by zero" in message.last_error and message.next_attempt_at > db_now()


@pytest.mark.parametrize(("topic", "lane"), [("test", CONTROL), ("slow", "aside")])
def test_a_task_at_its_soft_time_limit_ends_and_keeps_what_it_did(topic: str, lane: str) -> None:
    publish("first", topic)
    publish("late", topic, is_slow=True)
    publish("next", topic)

    with pytest.raises(SoftTimeLimitExceeded):
        outbox.deliver_due(lane=lane)

    assert delivered_keys() == ["first"]
    late = OutboxMessage.objects.get(key="late")
    assert (late.attempts, late.sent_at) == (1, None) and late.next_attempt_at > db_now()
    outbox.deliver_due(lane=lane)
    assert delivered_keys() == ["first", "next"]


def test_delivery_is_woken_by_the_commit_and_not_before(django_capture_on_commit_callbacks: Any) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        publish("a")
        assert woken == []

        publish("b", "slow")

    assert woken == ["control", "aside"]


@pytest.mark.django_db(transaction=True)
def test_outside_of_a_transaction_nothing_is_published() -> None:
    with pytest.raises(NoTransaction):
        outbox.publish(topic="test", key="a", payload={})


def test_work_on_files_of_a_suspended_organization_waits_and_delays_nothing(organization, rival) -> None:
    Organization.objects.filter(pk=organization.pk).update(suspended_at=db_now())
    publish("a", topic="waiting", organization=organization.pk)
    publish("b", topic="slow", organization=organization.pk)
    publish("c", topic="waiting", organization=rival.pk)

    while outbox.deliver_due(lane="aside", limit=1):
        pass
    assert sorted(delivered_keys()) == ["b", "c"]

    Organization.objects.filter(pk=organization.pk).update(suspended_at=None)
    assert outbox.deliver_due(lane="aside") == 1 and delivered_keys()[-1] == "a"
