"""`anneal webhooks`: the secret is printed once, alone; events are tested and sent again."""

import httpx
import pytest

from apps.accounts.models import DeliveryStatus, WebhookDelivery, WebhookEndpoint

CREATE = ("webhooks", "create", "https://hooks.example.com/anneal", "--event", "batch.completed")


@pytest.mark.slow
def test_a_webhook_is_created_paused_rotated_and_deleted(anneal, organization, network) -> None:
    made = anneal(*CREATE, "--event", "balance.low")
    webhook = WebhookEndpoint.objects.get()
    listed = anneal("webhooks", "list")
    paused, resumed = anneal("webhooks", "pause", webhook.pk), anneal("webhooks", "resume", webhook.pk, "--json")
    rotated = anneal("webhooks", "rotate", webhook.pk)
    deleted = anneal("webhooks", "delete", webhook.pk)

    assert made.output.startswith("whsec_") and len(made.output.split()) == 1 and webhook.pk in made.errors
    assert webhook.url in listed.output and "batch.completed, balance.low" in listed.output
    assert "is paused." in paused.output and resumed.json["status"] == "active"
    assert rotated.output.startswith("whsec_") and rotated.output != made.output
    assert deleted.exit_code == 0 and not WebhookEndpoint.objects.exists()
    refused = anneal("webhooks", "create", "http://10.0.0.1/", "--event", "batch.completed")
    assert refused.exit_code == 5 and "https" in refused.errors


def test_a_webhook_exists_once_although_the_first_answer_was_lost(anneal, organization, network) -> None:
    inner = network.inner

    class LosesTheFirst(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            network.inner = inner
            inner.handle_request(request)
            raise httpx.ReadError("connection reset")

    network.inner = LosesTheFirst()

    made = anneal(*CREATE, "--json")

    assert made.exit_code == 0 and len(network.paths("POST")) == 2, made.errors
    assert made.json["id"] == WebhookEndpoint.objects.get().pk


def test_a_delivery_is_tested_listed_and_sent_again(anneal, organization) -> None:
    webhook = anneal(*CREATE, "--json").json["id"]
    tested = anneal("webhooks", "test", webhook, "--json").json
    early = anneal("webhooks", "replay", webhook, tested["id"])
    WebhookDelivery.objects.update(status=DeliveryStatus.FAILED, attempts=10, response_code=503)
    listed = anneal("webhooks", "deliveries", webhook)
    again = anneal("webhooks", "replay", webhook, tested["id"])

    assert (tested["event_type"], tested["status"]) == ("webhook.test", "pending")
    assert early.exit_code == 5 and "still being delivered" in early.errors
    assert "webhook.test" in listed.output and "503" in listed.output
    assert again.exit_code == 0 and f"{tested['id']} is pending." in again.output
    assert anneal("webhooks", "deliveries", "../me").exit_code == 4
