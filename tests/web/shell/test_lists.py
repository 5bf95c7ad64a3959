"""Every list: search, filters, order and pages by the address, the same rows as CSV, and views that a member saves."""

import html
import io
import re
from csv import reader
from urllib.parse import parse_qs, urlsplit

import pytest
from django.db import connection
from django.http import HttpResponse
from django.test.utils import CaptureQueriesContext

from apps.accounts.members.memberships import remove_member
from apps.accounts.models import ApiKey, Membership, SavedView, User
from apps.accounts.operations import MAX_SAVED_VIEWS, save_view
from apps.core.database import listing
from apps.core.database.clock import db_now
from apps.core.objects.page_tables import answer_with_table
from apps.datasets.models import DatasetVersion
from apps.finetuning.models import FineTuningJob
from apps.serving.operations import deploy
from tests.factories.accounts import make_key, make_member
from tests.factories.datasets import make_ready_version, make_version
from tests.factories.serving import make_version as make_adapter_version

pytestmark = pytest.mark.django_db


def text(client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200
    return html.unescape(response.content.decode())


def rows(client, path: str) -> list[str]:
    """Return the names in the list, in their order."""
    return re.findall(r'class="name"[^>]*>([^<]+)<', text(client, path).partition('id="content"')[2])


def csv(client, path: str) -> list[list[str]]:
    return [line.split(",") for line in b"".join(client.get(path).streaming_content).decode().splitlines()]


@pytest.mark.slow
def test_datasets_are_one_row_each_with_their_versions_under_it(organization, client_for, bob) -> None:
    for name in ("cards", "bills", "cards"):
        make_ready_version(organization, dataset_name=name, filename=f"{name}.jsonl")
    first, second = DatasetVersion.objects.filter(dataset__name="cards").order_by("number")
    client = client_for(bob)

    assert rows(client, "/datasets") == ["cards", "bills"]
    assert rows(client, "/datasets?sort=name") == ["bills", "cards"]
    assert rows(client, "/datasets?q=bill") == ["bills"]
    page = text(client, "/datasets?q=cards")
    assert page.index(f"/datasets/{second.pk}") < page.index(f"/datasets/{first.pk}")
    assert [row[:2] for row in csv(client, "/datasets/export?sort=name")[1:]] == [["bills", "1"], ["cards", "2"]]


@pytest.mark.slow
def test_fine_tunes_name_who_created_them_and_are_filtered_by_it_and_by_method(floor, client_for, alice, bob) -> None:
    key = make_key(floor.organization, alice).key
    for name, creator, method in (("mine", bob.pk, "qlora"), ("hers", alice.pk, "lora"), ("keys", key.pk, "lora")):
        FineTuningJob.objects.filter(pk=floor.job(suffix=name).pk).update(created_by=creator, method=method)
    client = client_for(bob)

    assert rows(client, "/jobs?by=me") == rows(client, "/jobs?method=qlora") == ["mine"]
    assert [row[1] for row in csv(client, "/jobs/export?by=me")[1:]] == ["mine"]
    page = " ".join(text(client, "/jobs?method=lora").split())
    assert f"by {alice}" in page and f"by key {key.name}" in page and f"by {bob}" not in page


def test_datasets_are_filtered_by_the_state_of_their_newest_version(organization, client_for, bob) -> None:
    make_ready_version(organization, dataset_name="cards")
    make_version(organization, dataset_name="new")
    client = client_for(bob)

    assert rows(client, "/datasets?status=ready") == ["cards"]
    assert rows(client, "/datasets?status=checking") == ["new"]
    assert "Nothing matches" in text(client, "/datasets?status=invalid")
    assert rows(client, "/datasets?status=other") == ["new", "cards"]


def test_adapters_are_filtered_by_whether_they_are_served(floor, organization, client_for, bob) -> None:
    served, other = (make_adapter_version(organization, floor.base_model) for _ in range(2))
    deploy(version=served, by="system")
    client = client_for(bob)

    on, off = text(client, "/adapters?serving=on"), text(client, "/adapters?serving=off")
    assert served.model_name in on and other.model_name not in on
    assert served.model_name not in off and other.model_name in off
    assert [row[0] for row in csv(client, f"/adapters/export?q={other.model_name}")[1:]] == [other.pk]


@pytest.mark.slow
def test_keys_and_members_are_searched_and_filtered(organization, client_for, alice, bob, vera) -> None:
    nightly, old = (make_key(organization, alice).key for _ in range(2))
    ApiKey.objects.filter(pk=nightly.pk).update(name="nightly")
    ApiKey.objects.filter(pk=old.pk).update(name="old", expires_at="2020-01-01T00:00Z")
    client = client_for(bob)

    assert rows(client, "/keys?sort=name") == ["nightly", "old"]
    assert rows(client, "/keys?status=expired") == ["old"]
    assert rows(client, "/keys?q=night") == ["nightly"]
    assert [row[1] for row in csv(client, "/keys/export?status=active")[1:]] == ["nightly"]
    assert rows(client, "/members?role=viewer") == [str(vera)]
    assert rows(client, f"/members?q={bob.email}") == [str(bob)]
    assert [row[1] for row in csv(client, "/members/export?role=owner")[1:]] == [alice.email]


def test_a_persons_name_is_no_formula_in_the_csv_of_keys(organization, client_for, alice) -> None:
    User.objects.filter(pk=alice.pk).update(name="=1+1")
    make_key(organization, alice)

    assert csv(client_for(alice), "/keys/export")[1][5] == "'=1+1"


@pytest.mark.slow
def test_pages_follow_the_last_row_and_lead_back(organization, client_for, alice, monkeypatch) -> None:
    monkeypatch.setattr(listing, "PAGE_ROWS", 2)
    for name in "edcba":
        make_member(organization, "viewer", f"viewer-{name}")
    client = client_for(alice)
    path = "/members?role=viewer&sort=name"
    seen, pages = [], []
    while path:
        pages.append(path)
        seen.append(rows(client, path))
        path = "".join(re.findall(r'href="([^"]+)"\s+rel="next"', text(client, path)))

    assert [len(page) for page in seen] == [2, 2, 1]
    found = [name for page in seen for name in page]
    assert found == sorted(found)
    back = re.findall(r'href="([^"]+)"\s+rel="prev"', text(client, pages[2]))
    assert rows(client, back[0]) == seen[1]
    assert parse_qs(urlsplit(back[0]).query)["role"] == ["viewer"]
    assert rows(client, "/members?role=viewer&sort=name&after=mem_gone") == seen[0]


@pytest.mark.slow
def test_a_view_is_a_link_above_its_list_for_the_member_who_saved_it(organization, client_for, alice, bob) -> None:
    client = client_for(bob)
    page = text(client, "/members?role=viewer&q=x")
    query = re.search(r'name="query" value="([^"]+)"', page)[1]

    saved = client.post("/views", {"listing": "web:member_list", "name": " My  viewers ", "query": query})
    assert saved.headers["Location"] == f"/members?{query}"
    assert f'href="/members?{query}"' in text(client, "/members") and "My viewers" in text(client, "/members")
    assert "My viewers" not in text(client, "/keys") + text(client_for(alice), "/members")

    view = SavedView.objects.get()
    assert client_for(alice).post(f"/views/{view.pk}/delete").status_code == 403
    assert client.post(f"/views/{view.pk}/delete").headers["Location"] == "/members"
    assert not SavedView.objects.exists()


@pytest.mark.slow
def test_a_view_has_a_name_a_list_and_a_limit(organization, client_for, bob) -> None:
    client = client_for(bob)
    view = {"listing": "web:job_list", "name": "failed", "query": "status=failed"}

    assert client.post("/views", view | {"listing": "staff:job_list"}).status_code == 404
    for broken in ({"name": " "}, {"name": "x" * 61}, {"query": ""}, {"query": "q=" + "x" * 600}):
        assert client.post("/views", view | broken).status_code == 302
    assert not SavedView.objects.exists()
    membership = Membership.objects.get(user=bob)
    for number in range(MAX_SAVED_VIEWS):
        save_view(membership=membership, listing="web:job_list", name=f"view {number}", query="q=x")
    refused = client.post("/views", view, follow=True)
    assert "at most 20 saved views" in refused.content.decode()
    client.post("/views", view | {"name": "view 3"})
    assert SavedView.objects.get(name="view 3").query == "status=failed"


def test_the_views_of_a_member_go_with_them(organization, alice, bob) -> None:
    membership = Membership.objects.get(user=bob)
    save_view(membership=membership, listing="web:job_list", name="failed", query="status=failed")

    remove_member(organization=organization, membership_id=membership.pk, by=alice, now=db_now())

    assert not SavedView.objects.exists()


@pytest.mark.parametrize("query", ["", "?q=demo", "?sort=cost"])
def test_a_list_chooses_its_rows_before_it_joins_related_ones(query, floor, client_for, bob) -> None:
    """Joined first, all jobs of a large organization were read: row-level security misleads PostgreSQL's estimates."""
    job, client = floor.job(), client_for(bob)

    with CaptureQueriesContext(connection) as captured:
        page = text(client, f"/jobs{query}")

    choosing = [each["sql"] for each in captured if each["sql"].endswith(f"LIMIT {listing.PAGE_ROWS + 1}")]
    assert len(choosing) == 1 and " JOIN " not in choosing[0]
    assert f"/jobs/{job.pk}" in page


def test_a_table_is_also_a_file_for_the_readers_of_its_page(
    organization, client_for, alice, bob, vera, rival, charlie
) -> None:
    address = "/service-accounts?csv=service-accounts"
    client_for(alice).post("/service-accounts", {"name": "=robot-7", "role": "member"})

    refused = client_for(alice).post("/service-accounts", {"name": "", "role": "member"})
    assert refused.status_code == 422 and 'data-csv="service-accounts"' in refused.content.decode()
    assert "?csv=" not in refused.content.decode(), "the address of a form may have no page"
    for person in (alice, bob, vera):
        assert 'href="?csv=service-accounts"' in text(client_for(person), "/service-accounts")
        header, row = csv(client_for(person), address)
        assert header == ["Name", "Role", "Active keys", "Created"]
        assert row[0].strip('"').startswith("'=robot-7") and row[2:4] == ["Member", "0"], row
    assert "robot-7" not in text(client_for(charlie), address)
    assert client_for(None).get(address).status_code == 302
    assert 'data-csv="service-accounts"' in text(client_for(alice), "/service-accounts?csv=other")


def test_a_message_waits_for_a_page_while_a_table_is_sent(organization, client_for, alice) -> None:
    client = client_for(alice)
    client.post("/service-accounts", {"name": "robot", "role": "member"})

    csv(client, "/service-accounts?csv=service-accounts")

    assert "robot (service account) is created." in text(client, "/service-accounts")
    assert "is created." not in text(client, "/service-accounts")


@pytest.mark.parametrize(("path", "status"), [("/organization/webhooks", 403), ("/staff/pools", 403)])
def test_a_table_is_no_file_for_those_who_may_not_see_its_page(path, status, organization, client_for, vera) -> None:
    assert client_for(vera).get(f"{path}?csv=webhooks").status_code == status


def test_a_table_as_a_file_has_all_pages_and_the_values_that_programs_read(rf) -> None:
    def page() -> HttpResponse:
        """Return a page as the templates write it, with the parameters that its view sees."""
        assert dict(request.GET.items()) == {"csv": "rows", "status": "ok"}
        return HttpResponse(
            '<table class="table" data-csv="other"><tr><th>Else</th></tr></table>'
            '<table class="table" data-csv="rows" id="x"><caption class="vh">Rows</caption><thead><tr>'
            '<th scope="col"><span class="vh">Figure</span></th><th>Cost</th><th>Share</th><th>Since</th><th>Size</th>'
            '<th>Role</th><th><span class="vh">Actions</span></th></tr></thead><tbody>'
            '<tr><td>A &amp; B<div class="sub">x<br>=1+1</div></td><td class="right num">\n −$1,234.50 </td>'
            '<td><b class="num">12.5%</b></td>'
            '<td><time datetime="2026-01-02T03:04:05+00:00" title="x">yesterday</time></td>'
            '<td><data value="61400000">61.4 MB</data></td>'
            "<td><form><select><option>Admin</option><option selected>Viewer</option></select>"
            "<button>Save</button></form></td>"
            '<td class="acts"><a href="/x">Open</a></td></tr>'
            '<tr><td>C<svg><use href="#i"/></svg></td><td class="num">0.05¢</td><td>–</td>'
            '<td>50%</td><td colspan="2">0,1,2</td>'
            '<td><a class="btn btn-sm" href="/y">Remove<span class="vh"> C</span></a></td></tr>'
            "</tbody><tfoot><tr><td>Sum</td></tr></tfoot></table>"
        )

    request = rf.get("/x?csv=rows&status=ok&after=7&topups_before=8")
    sent = b"".join(answer_with_table(request, page)).decode()

    assert list(reader(io.StringIO(sent))) == [
        ["Figure", "Cost", "Share", "Since", "Size", "Role"],
        ["A & B, x, =1+1", "-1234.50", "0.125", "2026-01-02T03:04:05+00:00", "61400000", "Viewer"],
        ["C", "0.0005", "", "50%", "0,1,2", ""],
    ]


def test_a_file_has_every_row_or_none(organization, alice, client_for, monkeypatch):
    for _ in range(3):
        make_key(organization, alice)
    monkeypatch.setattr(listing, "_MAX_EXPORTED", 3)
    monkeypatch.setattr(listing, "_READ_AT_ONCE", 1)
    assert len(csv(client_for(alice), "/keys/export")) == 4

    make_key(organization, alice)
    refused = client_for(alice).get("/keys/export")

    assert refused.status_code == 400 and "A file has at most 3 rows." in refused.content.decode()
