"""The form of a webhook: its events stand by subject, and what is chosen is kept."""

from apps.accounts.models import WebhookEndpoint
from apps.accounts.notices.events import EVENT_TYPES
from apps.interfaces.web.account.webhooks import WebhookForm
from tests.support.pages import text


def test_every_event_stands_under_one_subject():
    listed = [box.data["value"] for _, boxes in WebhookForm().event_groups for box in boxes]

    assert sorted(listed) == sorted(EVENT_TYPES)


def test_a_webhook_keeps_the_events_that_were_chosen(organization, client_for, alice, bob):
    browser, url = client_for(alice), "/organization/webhooks"
    chosen = ["adapter.deployed", "budget.reached"]
    assert client_for(bob).post(url, {}).status_code == 403

    wrong = browser.post(url, {"url": "https://hooks.example.com/a", "format": "standard"})
    made = browser.post(url, {"url": "https://hooks.example.com/a", "format": "standard", "event_types": chosen})

    assert wrong.status_code == 422 and "This field is required" in text(wrong)
    assert set(WebhookEndpoint.objects.get().event_types) == set(chosen)
    assert "whsec_" not in text(browser.get(f"{made['Location']}?csv=deliveries"))
    page = text(browser.get(made["Location"]))
    assert "whsec_" in page and "whsec_" not in text(browser.get(made["Location"]))
    assert page.count('class="check pick"') == len(EVENT_TYPES) and page.count(" checked>") == len(chosen)
    assert "Members and webhooks</legend>" in page and "All<span" in page


def test_a_webhook_is_listed_by_its_name_if_it_has_one(organization, client_for, alice):
    browser, url = client_for(alice), "/organization/webhooks"
    given = {"url": "https://hooks.example.com/a", "format": "standard", "event_types": ["batch.completed"]}

    page = browser.post(url, given)["Location"]
    unnamed = text(browser.get(url))
    wrong = browser.post(page, given | {"name": "a" * 101})
    browser.post(page, given | {"name": "Jobs of <Acme>"})

    assert ">https://hooks.example.com/a</a>" in unnamed
    assert wrong.status_code == 422 and "100" in text(wrong)
    assert ">Jobs of &lt;Acme&gt;</a>" in browser.get(url).content.decode()
