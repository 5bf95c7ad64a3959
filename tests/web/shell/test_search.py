"""Search of the command palette: by name and id, within the organization, and by what the reader's role may open."""

import html
import re

import pytest

from apps.accounts.models import ApiKey
from apps.adapters.models import Adapter
from apps.finetuning.models import Worker
from tests.factories.accounts import make_key, make_organization, make_user
from tests.factories.datasets import make_ready_version
from tests.factories.serving import make_version
from tests.support.pages import text


@pytest.fixture
def objects(floor, organization, alice):
    """One object of each kind, each with `bank` in its name."""
    adapter = make_version(organization, floor.base_model)
    Adapter.objects.filter(pk=adapter.adapter_id).update(name="bank bot")
    ApiKey.objects.filter(pk=make_key(organization, alice).key.pk).update(name="bank nightly")
    return {
        "dataset": make_ready_version(organization, dataset_name="bank questions"),
        "job": floor.job(suffix="bank-triage"),
        "adapter": adapter,
    }


def hits(client, query: str, *, path: str = "/search") -> dict[str, list[str]]:
    """Return the addresses found, by their group."""
    response = client.get(path, {"q": query})
    assert response.status_code == 200
    groups = re.findall(
        r'<div role="group" aria-label="([^"]+)">(.*?)(?=<div role="group"|$)', response.content.decode(), re.DOTALL
    )
    return {label: [html.unescape(url) for url in re.findall(r'data-href="([^"]+)"', body)] for label, body in groups}


def test_each_kind_is_found_by_name(objects, client_for, bob) -> None:
    found = hits(client_for(bob), "BANK")

    assert found == {
        "Datasets": [f"/datasets/{objects['dataset'].pk}"],
        "Fine-tunes": [f"/jobs/{objects['job'].pk}"],
        "Adapters": [f"/adapters/{objects['adapter'].pk}"],
        "API keys": [f"/keys?q={ApiKey.objects.get().pk}"],
    }


@pytest.mark.parametrize(("kind", "group"), [("dataset", "Datasets"), ("job", "Fine-tunes"), ("adapter", "Adapters")])
def test_each_kind_is_found_by_its_id(kind, group, objects, client_for, bob) -> None:
    assert [url.endswith(objects[kind].pk) for url in hits(client_for(bob), objects[kind].pk)[group]] == [True]


def test_pages_of_the_help_are_found_by_title_and_summary(organization, client_for, vera) -> None:
    client = client_for(vera)

    assert hits(client, "BUDGETS invoices")["Help"] == hits(client, "billing credit")["Help"] == ["/help/billing"]
    assert hits(client, "reference call")["Help"] == ["/help/reference"]


def test_every_word_must_match_and_one_character_finds_nothing(objects, client_for, bob) -> None:
    client = client_for(bob)

    assert list(hits(client, "bank quest")) == ["Datasets"]
    assert hits(client, "bank nothing") == hits(client, "b") == hits(client, "%%") == hits(client, "") == {}


def test_another_organization_and_its_operator_page_stay_hidden(objects, client_for, charlie, rival) -> None:
    assert hits(client_for(charlie), "bank") == hits(client_for(charlie), "acme") == {}
    assert client_for(None).get("/search?q=bank").status_code == 302
    assert client_for(charlie).get("/staff/search?q=bank").status_code == 403


@pytest.mark.slow
def test_a_viewer_is_offered_nothing_that_would_be_refused(objects, floor, client_for, vera, bob) -> None:
    client = client_for(vera)
    offered = [url for urls in hits(client, floor.base_model.name).values() for url in urls]
    shell = text(client.get("/adapters"))
    actions = re.findall(r'id="do-\d+" data-href="([^"]+)"', shell)

    assert "Fine-tune a base model" in hits(client_for(bob), floor.base_model.name)
    assert offered and "/organization" in actions and not {"/jobs/new", "/organization/audit"} & set(actions)
    assert {client.get(url).status_code for url in [*offered, *actions]} == {200}


@pytest.mark.slow
def test_operators_find_organizations_and_pools_with_or_without_one_of_their_own(objects, client_for) -> None:
    olga = make_user("olga", is_operator=True)
    acme = objects["job"].organization
    found = hits(client_for(olga), "acme", path="/staff/search")

    assert found == {"Organizations": [f"/staff/organizations/{acme.pk}"]}
    assert "GPU pools" in hits(client_for(olga), "local-cpu", path="/staff/search")
    worker = Worker.objects.select_related("pool").first()
    assert hits(client_for(olga), worker.pk, path="/staff/search") == {"Workers": [f"/staff/workers/{worker.pk}"]}
    job = objects["job"].pk
    assert hits(client_for(olga), job, path="/staff/search") == {"Jobs": [f"/staff/jobs/{job}"]}
    shell = client_for(olga).get("/staff/pools").content.decode()
    assert 'hx-get="/staff/search"' in shell and 'hx-get="/search"' not in shell
    make_organization("Olga's", owner=olga)
    assert hits(client_for(olga), "bank") == {}
    assert 'hx-get="/search"' in client_for(olga).get("/staff/pools").content.decode()


def test_at_most_five_of_a_kind_are_shown_the_newest_first(organization, client_for, bob) -> None:
    versions = [make_ready_version(organization, dataset_name=f"rows {number}") for number in range(6)]

    found = hits(client_for(bob), "rows")["Datasets"]

    assert found == [f"/datasets/{version.pk}" for version in reversed(versions[1:])]


def test_a_suspended_organization_is_not_searched(objects, organization, client_for, bob) -> None:
    organization.suspended_at = objects["job"].created_at
    organization.save(update_fields=["suspended_at"])

    assert client_for(bob).get("/search?q=bank").status_code == 403
