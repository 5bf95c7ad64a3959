"""The page of notifications: what concerns the reader, page by page, with an unread mark."""

from functools import partial

import pytest

from apps.accounts.models import Notification
from apps.accounts.notices.events import announce
from tests.support.pages import text


@pytest.fixture
def noted(organization, alice, bob):
    def note(count: int, user=alice) -> None:
        for number in range(count):
            announce(
                organization=organization,
                type="fine_tuning.job.failed",
                subject="ftjob-1",
                title=partial("Event {:02} of {}".format, number, user.email),
                path=f"/jobs/ftjob-{number}",
                key=f"{number}",
                users=[user.pk],
            )

    return note


def test_a_reader_sees_their_own_with_links_and_the_bell_says_that_some_are_unread(noted, alice, bob, client_for):
    noted(1)

    page = text(client_for(alice).get("/notifications"))

    assert "Event 00" in page and "Notifications, some unread" in page
    others = text(client_for(bob).get("/notifications"))
    assert "No notifications" in others and "some unread" not in others


def test_pages_follow_one_another_without_gaps(noted, alice, client_for):
    noted(30)
    client = client_for(alice)
    first = client.get("/notifications")
    older = text(first).partition('rel="next"')[0].rpartition('href="')[2].partition('"')[0]

    second = text(client.get(f"/notifications{older}"))

    shown = [number for number in range(30) if f"Event {number:02}" in text(first) + second]
    assert len(shown) == 30 and text(first).count("Event ") and 'href="/notifications"' in second


def test_one_and_all_are_marked_as_read(noted, alice, client_for):
    noted(3)
    client = client_for(alice)
    chosen = Notification.objects.order_by("id")[0]

    client.post("/notifications/read", {"notification": chosen.pk})
    assert Notification.objects.filter(read_at=None).count() == 2
    client.post("/notifications/read")

    assert not Notification.objects.filter(read_at=None).exists()
    assert "some unread" not in text(client.get("/notifications"))


def test_opening_one_marks_it_as_read(noted, alice, client_for):
    noted(2)
    client, chosen = client_for(alice), Notification.objects.order_by("id")[0]
    assert f'form="open-{chosen.pk}" name="open"' in text(client.get("/notifications"))

    opened = client.post("/notifications/read", {"notification": chosen.pk, "open": "1"})

    assert opened.url == chosen.path == "/jobs/ftjob-0"
    assert Notification.objects.get(read_at=None) != chosen
    assert 'href="/jobs/ftjob-0"' in text(client.get("/notifications"))


def test_nobody_marks_the_notifications_of_another_member(noted, alice, bob, client_for):
    noted(1)

    client_for(bob).post("/notifications/read", {"notification": Notification.objects.get().pk})
    client_for(bob).post("/notifications/read")

    assert Notification.objects.get().read_at is None
