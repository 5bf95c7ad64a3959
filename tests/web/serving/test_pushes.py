"""Pushes to the hub from the dashboard: who may ask for one, what is refused, and the part that follows them."""

import pytest

from apps.core.database.clock import db_now
from apps.finetuning.models import Conversion, HubPush, HubPushToken
from tests.support.pages import text

TOKEN = "hf_token-of-a-customer"
PART = {"HX-Request": "true", "HX-Target": "div#adapter-exports"}


@pytest.mark.slow
def test_a_push_is_asked_for_by_members_and_followed_on_the_page(
    version, client_for, bob, vera, charlie, rival, settings
):
    settings.HUB_PUSHES = True
    page, url = f"/adapters/{version.pk}", f"/adapters/{version.pk}/push"
    sent = {"repository": "acme/support", "export": "", "token": TOKEN}
    for person, status in ((vera, 403), (charlie, 404), (None, 302)):
        browser = client_for(person)
        assert [browser.get(url).status_code, browser.post(url, sent).status_code] == [status, status]
    assert url not in text(client_for(vera).get(page)) and not HubPush.objects.exists()
    browser = client_for(bob)
    assert url in text(browser.get(page)) and 'type="password"' in text(browser.get(url))

    assert browser.post(url, sent)["Location"] == page

    push = HubPush.objects.get()
    assert (push.repository, push.export, push.created_by) == ("acme/support", "", bob.pk)
    assert HubPushToken.objects.get().push == push
    waiting = text(client_for(vera).get(page))
    assert f'href="{settings.HUB_URL}/acme/support"' in waiting and "Waiting</span>" in waiting
    assert TOKEN not in waiting
    HubPush.objects.update(status="running")
    HubPush.objects.update(status="failed", problem="The hub does not accept this token.", ended_at=db_now())
    failed = text(client_for(vera).get(page, headers=PART))
    assert "Failed</span>" in failed and "does not accept this token" in failed


@pytest.mark.slow
def test_what_is_wrong_with_a_push_stands_at_its_field(version, client_for, bob, settings):
    settings.HUB_PUSHES = True
    browser, url = client_for(bob), f"/adapters/{version.pk}/push"
    sent = {"repository": "acme/support", "export": "", "token": TOKEN}
    wrong = [
        ({"repository": "support"}, "repository", "owner/name"),
        ({"token": "short"}, "token", "8 to 400 characters"),
        ({"export": "gguf"}, "export", "Select a valid choice"),
    ]
    for changes, field, words in wrong:
        answer = browser.post(url, sent | changes)
        assert answer.status_code == 422
        assert words in text(answer).partition(f'id="id_{field}_error"')[2][:300], field
        assert TOKEN not in text(answer), "a token is never shown again"
    settings.HUB_PUSHES = False
    refused = browser.post(url, sent)
    assert refused.status_code == 422 and "does not push to a hub" in text(refused)
    assert "does not push to a hub" in text(browser.get(url)) and url not in text(
        browser.get(f"/adapters/{version.pk}")
    )
    assert not HubPush.objects.exists()


@pytest.mark.slow
def test_the_exports_ask_for_themselves_while_something_is_made(version, client_for, vera):
    browser, url = client_for(vera), f"/adapters/{version.pk}"
    polls = f'id="adapter-exports" hx-get="{url}"'
    assert polls not in text(browser.get(url))
    order = Conversion.objects.create(
        organization=version.organization, version=version, kind="merged_16bit", bytes=1, price_nano=0,
        created_by="system", created_at=db_now(),
    )  # fmt: skip

    page, part = text(browser.get(url)), text(browser.get(url, headers=PART))

    assert polls in page and polls in part and "Waiting for an idle trainer" in part
    assert "<h1" not in part and "adapter-state" not in part
    Conversion.objects.filter(pk=order.pk).update(status="running")
    Conversion.objects.filter(pk=order.pk).update(status="failed", ended_at=db_now(), problem="The disk was full.")
    ended = text(browser.get(url, headers=PART))
    assert polls not in ended and "The disk was full." in ended
