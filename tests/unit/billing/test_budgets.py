"""A budget limits what is started, counts what was charged, and alerts at each threshold exactly once."""

import datetime
from collections import Counter
from typing import Any

import pytest
from django.core import mail

from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.members.projects import create_project
from apps.accounts.models import Organization, User, default_project_id
from apps.billing import budget_settings
from apps.billing.budget_settings import end_budget, set_budget, set_key_labels
from apps.billing.budgets import Attribution, BudgetExceeded, attribution_of_key, describe, get_states
from apps.billing.invoices.mail import publish_reports, send_alert, send_report
from apps.billing.models import BillingProfile, Budget, BudgetAlert, Hold, KeyLabel
from apps.billing.operations import refund_source
from apps.billing.usage.slices import lease_slice
from apps.billing.usage.spending import Spend
from apps.billing.usage.sums import forecast_month
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue
from apps.core.models import OutboxMessage
from tests.factories import money
from tests.factories.accounts import make_organization, make_user
from tests.factories.money import USD, give_credit
from tests.factories.usage import list_spending, sum_by
from tests.support.database import at_once


@pytest.fixture
def rich(organization: Organization) -> Organization:
    give_credit(organization)
    return organization


def budget(organization: Organization, usd: int, *, scope: str = "organization", target: str = "", mode: str = "block"):
    return set_budget(
        organization=organization,
        scope=scope,
        target=target,
        limit_nano=usd * USD,
        mode=mode,
        by="user_1",
        now=db_now(),
    )


def place(organization: Organization, usd: int, source: str = "ftjob-1", **whose: Any) -> Hold:
    return money.place_hold(organization, usd * USD, source, attribution=Attribution(**whose))


def spend(organization: Organization, usd: int, source: str = "ftjob-1", **whose: Any) -> None:
    money.spend(organization, usd * USD, source, attribution=Attribution(**whose))


@pytest.mark.parametrize(
    ("scope", "target", "whose"),
    [
        ("organization", "", {}),
        ("label", "team=search", {"labels": {"team": "search", "stage": "test"}}),
        ("member", "alice", {"member_id": "alice"}),
    ],
)
def test_nothing_is_started_beyond_a_budget(rich, alice: User, scope, target, whose):
    if scope == "member":
        target, whose = alice.pk, {"member_id": alice.pk}
    budget(rich, 10, scope=scope, target=target)
    place(rich, 4, **whose)
    spend(rich, 5, source="ftjob-2", **whose)

    with pytest.raises(BudgetExceeded, match=r"\$1\.00 of \$10\.00"):
        place(rich, 2, source="ftjob-3", **whose)
    if scope != "organization":
        place(rich, 50, source="ftjob-4", labels={"team": "other"}, member_id="user_8")


def test_a_key_leases_no_more_than_its_budget_leaves_and_other_keys_go_on(rich, key: IssuedKey):
    budget(rich, 3, scope="key", target=key.key.pk)

    leased = lease_slice(organization=rich, required_nano=1 * USD, by="gateway:1", key_id=key.key.pk)

    assert leased.amount_nano == 3 * USD, "5 % of the wallet, but not beyond the budget"
    with pytest.raises(BudgetExceeded):
        lease_slice(organization=rich, required_nano=1, by="gateway:1", key_id=key.key.pk, hold_id=leased.hold_id)
    assert lease_slice(organization=rich, required_nano=1, by="gateway:1", key_id="key_other").amount_nano > 3 * USD


def state(of: Budget) -> tuple[int, int]:
    return get_states(organization=of.organization_id, budgets=[of], now=db_now())[of.pk]


def test_each_threshold_alerts_once_and_a_refund_does_not_arm_it_again(rich):
    found = budget(rich, 10, mode="alert")

    spend(rich, 5)
    spend(rich, 4, source="ftjob-2")
    refund_source(organization=rich, source="ftjob-2", by="system", reason="")
    spend(rich, 20, source="ftjob-3")

    assert sorted(BudgetAlert.objects.values_list("threshold", flat=True)) == [50, 80, 100]
    assert OutboxMessage.objects.filter(topic="billing.alert").count() == 3
    assert state(found) == (25 * USD, 0)


def test_a_new_budget_counts_what_the_month_cost_before_it(rich):
    spend(rich, 6)

    found = budget(rich, 10)

    assert state(found)[0] == 6 * USD
    assert [alert.threshold for alert in BudgetAlert.objects.all()] == [50]
    spend(rich, 1, source="ftjob-2")
    assert state(found)[0] == 7 * USD


def test_many_budgets_are_counted_in_two_statements(rich, django_assert_num_queries):
    budgets = [budget(rich, 10), *(budget(rich, 9, scope="label", target=f"team={name}") for name in "abc")]
    place(rich, 2, labels={"team": "b"})

    now = db_now()
    with django_assert_num_queries(2):
        states = get_states(organization=rich, budgets=budgets, now=now)

    assert [states[each.pk] for each in budgets] == [(0, 2 * USD), (0, 0), (0, 2 * USD), (0, 0)]


def test_an_exhausted_budget_that_pauses_asks_for_it_once(rich):
    budget(rich, 5, mode="pause")

    spend(rich, 3)
    spend(rich, 2, source="ftjob-2")

    assert OutboxMessage.objects.filter(topic="budget.exhausted").count() == 1
    budget(rich, 8, mode="pause")
    spend(rich, 3, source="ftjob-3")
    assert OutboxMessage.objects.filter(topic="budget.exhausted").count() == 2, "raised, and reached again"


def test_an_alert_names_a_private_project_by_its_id(rich, alice: User):
    secret = create_project(organization=rich, name="Secret", is_private=True, by=alice, now=db_now())
    found = budget(rich, 10, scope="project", target=secret.pk, mode="alert")
    assert describe(found) == "the project Secret"
    assert describe(found, by_id=True) == f"the project {secret.pk}"


def test_an_ended_budget_limits_nothing(rich):
    found = budget(rich, 1)

    assert end_budget(organization=rich, budget_id=found.pk, by="user_1", now=db_now())

    place(rich, 50)
    assert Budget.objects.count() == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"scope": "galaxy"}, "scope"),
        ({"scope": "label", "target": "team"}, "target"),
        ({"scope": "label", "target": "team= "}, "target"),
        ({"scope": "key", "target": "key_of_somebody_else"}, "target"),
        ({"scope": "member", "target": "user_of_somebody_else"}, "target"),
        ({"mode": "explode"}, "mode"),
        ({"usd": 0}, "limit_usd"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_by_its_field(rich, fields, param):
    with pytest.raises(InvalidValue) as refused:
        budget(rich, fields.pop("usd", 1), **fields)
    assert refused.value.param == param


def test_a_keys_labels_and_creator_are_whom_its_requests_are_charged_to(rich, key: IssuedKey, alice: User):
    set_key_labels(organization=rich, key_id=key.key.pk, labels={"team": "search"}, by=alice.pk)
    set_key_labels(organization=rich, key_id=key.key.pk, labels={"team": "ads"}, by=alice.pk)

    whose = attribution_of_key(organization=rich, key_id=key.key.pk)

    assert whose == Attribution(key.key.pk, alice.pk, {"team": "ads"}, default_project_id(rich))
    assert KeyLabel.objects.count() == 1


def test_budgets_their_thresholds_and_the_labels_of_a_key_are_limited(rich, key: IssuedKey, monkeypatch):
    monkeypatch.setattr(budget_settings, "MAX_BUDGETS", 2)
    for team in ("a", "b"):
        budget(rich, 10, scope="label", target=f"team={team}")
    budget(rich, 20, scope="label", target="team=b")

    with pytest.raises(InvalidState, match="at most 2 budgets"):
        budget(rich, 10, scope="label", target="team=c")
    with pytest.raises(InvalidValue, match="at most 10"):
        set_budget(
            organization=rich, scope="label", target="team=a", limit_nano=1, mode="alert", by="user_1", now=db_now(),
            thresholds=tuple(range(1, 12)),
        )  # fmt: skip
    with pytest.raises(InvalidValue, match="at most 16 labels"):
        labels = {f"name{number}": "x" for number in range(17)}
        set_key_labels(organization=rich, key_id=key.key.pk, labels=labels, by="user_1")


@pytest.mark.django_db(transaction=True)
def test_of_many_at_once_exactly_those_the_budget_allows_start():
    organization = make_organization("Crowd", owner=make_user("crowd"))
    give_credit(organization)
    budget(organization, 10)

    results = at_once(lambda number: place(organization, 3, source=f"ftjob-{number}"), 10)

    assert Counter(map(type, results)) == {Hold: 3, BudgetExceeded: 7}


@pytest.mark.django_db(transaction=True)
def test_a_threshold_passed_by_many_at_once_alerts_once():
    organization = make_organization("Crowd", owner=make_user("crowd"))
    give_credit(organization)
    budget(organization, 10, mode="alert")

    results = at_once(lambda number: spend(organization, 1, source=f"ftjob-{number}"), 12)

    assert [result for result in results if result is not None] == []
    assert sorted(BudgetAlert.objects.values_list("threshold", flat=True)) == [50, 80, 100]
    assert OutboxMessage.objects.filter(topic="billing.alert").count() == 3


# --- mail -------------------------------------------------------------------------------------------------------------


def test_an_alert_is_mailed_to_owners_and_admins_with_the_figures(rich, alice: User, ann: User, bob: User):
    budget(rich, 10)
    spend(rich, 9)

    for message in OutboxMessage.objects.filter(topic="billing.alert").order_by("id"):
        send_alert(**message.payload)

    assert [sent.subject for sent in mail.outbox] == [
        "Budget of the organization: 50% of $10.00 spent",
        "Budget of the organization: 80% of $10.00 spent",
    ]
    assert sorted(mail.outbox[0].to) == sorted([alice.email, ann.email])
    assert "$9.00 of the $10.00" in mail.outbox[0].body


def test_yesterday_is_reported_once_to_those_who_want_it(rich, alice: User, monkeypatch):
    for number in range(1, 14):
        spend(rich, 3 if number > 3 else 1, f"ftjob-{number}")
    charged_at = db_now()
    Hold.objects.update(closed_at=charged_at)  # all on one day
    tomorrow = charged_at.replace(hour=7) + datetime.timedelta(days=1)

    assert publish_reports(now=tomorrow.replace(hour=1)) == 0
    assert (publish_reports(now=tomorrow), publish_reports(now=tomorrow)) == (1, 1)
    message = OutboxMessage.objects.get(topic="billing.report")
    monkeypatch.setattr(Spend, "__init__", None)  # single lines are not read: a day may have any number
    send_report(**message.payload)

    assert mail.outbox[0].subject == f"Acme spent $33.00 on {charged_at:%-d %B}"
    body = mail.outbox[0].body
    assert "$3.00  training ftjob-13" in body and "training ftjob-3\n" not in body and "and 3 more" in body
    BillingProfile.objects.create(organization=rich, is_daily_report_wanted=False)
    assert publish_reports(now=tomorrow) == 0


def test_the_forecast_adds_the_days_to_come_at_the_mean_of_the_last_seven(rich):
    spend(rich, 7)
    now = db_now()
    today = now.date()

    forecast = forecast_month(organization=rich, now=now)

    days_left = ((today.replace(day=28) + datetime.timedelta(days=4)).replace(day=1) - today).days - 1
    assert (forecast.spent_nano, forecast.expected_nano) == (7 * USD, 7 * USD + days_left * USD)
    lines = list_spending(organization=rich, first=today, last=today)
    assert sum_by(lines, lambda line: line.subject) == {"ftjob-1": 7 * USD}


def test_a_label_with_blanks_is_the_one_that_keys_have(rich, key: IssuedKey):
    made = budget(rich, 10, scope="label", target="team = search")
    set_key_labels(organization=rich, key_id=key.key.pk, labels={"team": "search"}, by="user_1")

    attribution = attribution_of_key(organization=rich, key_id=key.key.pk)
    assert made.target == "team=search"
    assert Budget.objects.filter(attribution.targets()).get() == made


def test_what_is_used_without_a_key_counts_in_no_projects_budget(rich):
    budget(rich, 10, scope="project", target=default_project_id(rich))
    own = budget(rich, 20)

    assert Budget.objects.filter(attribution_of_key(organization=rich, key_id="").targets()).get() == own


def test_labels_of_keys_are_not_cut(rich, key: IssuedKey):
    for labels in ({"n" * 65: "v"}, {"n": "v" * 513}):
        with pytest.raises(InvalidValue, match="at most 64 characters"):
            set_key_labels(organization=rich, key_id=key.key.pk, labels=labels, by="user_1")
