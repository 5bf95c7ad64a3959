"""A member's change is refused, not left out, once the log has the most entries of an hour."""

import pytest

from apps.core import audit
from apps.core.audit import record, record_in_each
from apps.core.database.tenancy import system, tenant
from apps.core.errors import RateLimited
from apps.core.models import AuditEntry

pytestmark = pytest.mark.django_db


@pytest.fixture
def full(organization, monkeypatch):
    """Fill Acme's log of this hour; its first entry is that of its creation."""
    monkeypatch.setattr(audit, "_FEW", 1)
    monkeypatch.setattr(audit, "MAX_PER_HOUR", 3)
    with tenant(organization=organization):
        for person in ("user_1", "user_2", "user_3"):
            record_in_each(organizations=[organization], by="anonymous", action="person.sign_in_failed", target=person)
        for number in range(2):
            record(organization=organization, by="user_1", action="thing.changed", target=f"thing_{number}")


def test_beyond_the_limit_of_an_hour_a_change_is_refused(full, organization, rival):
    with pytest.raises(RateLimited, match="3 changes and downloads") as refused, tenant(organization=organization):
        record(organization=organization, by="key_1", action="thing.changed", target="thing_3")
    with tenant(organization=rival):
        record(organization=rival, by="user_2", action="thing.changed", target="thing_4")

    assert 3_500 < refused.value.data["retry_after_seconds"] <= 3_600
    assert not AuditEntry.objects.filter(target="thing_3").exists()


@pytest.mark.parametrize(
    "action", ["key.revoke", "member.remove", "project.member_remove", "project.archive", "dataset.deleted"]
)
def test_what_takes_something_away_is_recorded_beyond_it(full, organization, action):
    with tenant(organization=organization):
        record(organization=organization, by="user_1", action=action, target="thing_1")

    assert AuditEntry.objects.filter(action=action).count() == 1


def test_sign_ins_operators_and_the_platform_are_recorded_beyond_it(full, organization):
    with tenant(organization=organization):
        record(organization=organization, by="system", action="job.failed", target="job_1")
        record_in_each(organizations=[organization], by="user_1", action="person.sign_in", target="user_1")
    with system():
        record(organization=organization, by="user_operator", action="quota.set", target="quota_1")

    assert set(AuditEntry.objects.filter(organization=organization).values_list("action", flat=True)) >= {
        "job.failed", "person.sign_in", "quota.set",
    }  # fmt: skip


def test_entries_of_an_hour_ago_do_not_count(full, organization, monkeypatch):
    monkeypatch.setattr(audit, "_WAIT", audit._WAIT.replace("1 hour", "0 hours"))

    with tenant(organization=organization):
        record(organization=organization, by="user_1", action="thing.changed", target="thing_5")

    assert AuditEntry.objects.filter(target="thing_5").exists()
