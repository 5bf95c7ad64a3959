"""Regions in the console and on the pages of a customer: hidden until there are two."""

import pytest

from apps.accounts.models import Organization, Region
from tests.support.pages import text


@pytest.mark.slow
def test_regions_are_added_chosen_and_shown_to_the_customer(console, client_for, api_client, key, floor, vera) -> None:
    tenant, limits = floor.organization, f"/staff/quotas/{floor.organization.pk}"
    assert 'name="regions"' not in text(console.get(limits)), "with one region there is nothing to choose"

    assert console.post("/staff/regions", {"name": " eu "}).status_code == 302
    assert "No pool is here" not in text(console.get("/staff/regions"))
    assert console.post("/staff/regions", {"name": "EU"}).status_code == 422
    home = "/staff/regions/home"
    assert f"{home}?region=eu" in text(console.get("/staff/regions"))
    assert "Set home to eu?" in text(console.get(home, {"region": "eu"}))
    for sent, status in (({"region": "mars", "confirm": "mars"}, 404), ({"region": "eu"}, 422)):
        assert console.post(home, sent).status_code == status
    assert console.post(home, {"region": ["eu", "local"], "confirm": "2 regions"}).status_code == 302
    assert Region.objects.get(is_home=True).pk == "local"
    assert console.post(home, {"region": "eu", "confirm": "eu"}).status_code == 302
    assert list(Region.objects.filter(is_home=True).values_list("pk", flat=True)) == ["eu"]
    assert "No pool is here" in text(console.get("/staff/regions"))
    assert 'value="local"' in text(console.get(limits))
    assert console.post(limits, {"weight": "1", "regions": ["mars"]}).status_code == 422
    assert console.post(limits, {"weight": "1", "regions": ["local"]}).status_code == 302

    assert Organization.objects.get(pk=tenant.pk).regions == ["local"]
    assert tenant.name in text(console.get("/staff/regions"))
    assert "limited to local" in text(client_for(vera).get("/quotas"))
    assert api_client(key).get("/api/v1/me").json()["organization"]["regions"] == ["local"]
    console.post(limits, {"weight": "1"})
    assert api_client(key).get("/api/v1/me").json()["organization"]["regions"] is None
