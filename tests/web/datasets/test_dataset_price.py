"""The least price of training on a file, on the button of its page: asked for after the page."""

import re

import pytest
from django.urls import reverse

from apps.billing.queries import get_balance
from apps.core.templatetags.ui import usd
from apps.datasets.inspection.inspections import inspect_version
from apps.interfaces.web.datasets.price import least_nano
from apps.interfaces.web.wizard.draft import Draft
from tests.factories.datasets import make_ready_version
from tests.factories.finetuning import make_training_file

pytestmark = pytest.mark.django_db
PRICE = {"HX-Request": "true", "HX-Target": "span#least-price"}


@pytest.mark.slow
def test_the_button_has_the_cheapest_price_of_what_it_leads_to(floor, organization, alice, client_for) -> None:
    client, version = client_for(alice), make_training_file(organization, floor.base_model)
    inspect_version(version=version)
    address = reverse("web:dataset_detail", args=[version.pk]) + "?share=20&seed=7"

    body = client.get(address).content.decode()
    part = client.get(address, headers=PRICE).content.decode()

    assert 'id="least-price"' in body and "from $" not in body
    leads_to = re.search(r'href="([^"]+)"[^>]*>Fine-tune on this', body)[1].replace("&amp;", "&")
    assert "validation_share=0.2&seed=7" in leads_to
    assert client.get(leads_to).context["heading"] == "Choose a base model"
    method = client.get(leads_to.replace("step=model", "step=method")).content.decode()
    prices = re.findall(r'name="method".*?<span class="ms-auto num dim"[^>]*>([$\d.¢]+)', method, re.DOTALL)
    assert part.strip() == f'<span class="price" id="least-price">from {min(prices, key=_dollars)}</span>'


@pytest.mark.slow
def test_the_wizard_shows_the_same_price_and_the_balance_from_its_first_step(
    floor, organization, alice, client_for
) -> None:
    client, version = client_for(alice), make_training_file(organization, floor.base_model)
    uncounted = make_ready_version(organization, dataset_name="newer")
    model = floor.base_model
    least = usd(least_nano(organization, Draft({"dataset": version.pk, "model": model.name})))

    pages = [client.get(f"/jobs/new?dataset={version.pk}&step={step}") for step in ("dataset", "model")]
    unknown = client.get("/jobs/new").content.decode()

    assert uncounted.pk in unknown and "from $" not in unknown and "The estimate appears once" in unknown
    balance = usd(get_balance(organization=organization).available_nano)
    for page in pages:
        panel = page.content.decode().partition('id="price-live"')[2]
        assert f"from {least}" in panel and f"{version.dataset.name} with {model.display_name}" in panel
        assert re.search(rf"<dt>Balance</dt>\s*<dd>{re.escape(balance)}</dd>", panel)
        assert f"balance {balance}" in panel.partition('class="dock"')[2]


def _dollars(price: str) -> float:
    return float(price.strip("$¢")) / (100 if price.endswith("¢") else 1)


@pytest.mark.slow
def test_no_price_is_shown_that_nobody_could_pay(floor, organization, alice, client_for) -> None:
    version = make_training_file(organization, floor.base_model)
    floor.worker.delete()

    part = client_for(alice).get(reverse("web:dataset_detail", args=[version.pk]), headers=PRICE)

    assert part.status_code == 200 and part.content.strip() == b""
