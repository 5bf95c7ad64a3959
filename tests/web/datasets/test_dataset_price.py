"""The least price of training on a file, on the button of its page: asked for after the page."""

import re

import pytest
from django.urls import reverse

from apps.datasets.inspection.inspections import inspect_version
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


def _dollars(price: str) -> float:
    return float(price.strip("$¢")) / (100 if price.endswith("¢") else 1)


@pytest.mark.slow
def test_no_price_is_shown_that_nobody_could_pay(floor, organization, alice, client_for) -> None:
    version = make_training_file(organization, floor.base_model)
    floor.worker.delete()

    part = client_for(alice).get(reverse("web:dataset_detail", args=[version.pk]), headers=PRICE)

    assert part.status_code == 200 and part.content.strip() == b""
