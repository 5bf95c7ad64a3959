"""The help inside the product: every page of the repository that it lists, without a dead link or a forbidden style."""

import re
from pathlib import Path

import pytest
from django.test import Client
from django.urls import get_resolver

from apps.core.database.clock import db_now
from apps.interfaces.web.help.markdown import render
from apps.interfaces.web.help.pages import PAGES, page_of_view, read_page
from apps.serving.operations import undeploy
from tests.support.pages import text

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_every_page_is_shown_to_everybody_with_its_sections(db, client: Client, alice, organization, client_for):
    member = client_for(alice)

    for page in PAGES:
        rendered = read_page(page.slug)
        for reader in (client, member):
            response = reader.get(f"/help/{page.slug}")
            assert response.status_code == 200
            assert rendered.title in text(response)
            assert ("On this page" in text(response)) == bool(rendered.sections)
        assert "style=" not in rendered.html and "<script" not in rendered.html


@pytest.mark.slow
def test_every_link_of_a_page_leads_to_a_page_and_a_section(db, client: Client):
    ids = {page.slug: set(re.findall(r'id="([^"]+)"', read_page(page.slug).html)) for page in PAGES}

    for page in PAGES:
        for address in re.findall(r'href="([^"]+)"', read_page(page.slug).html):
            if address.startswith("http"):
                continue
            path, _, anchor = address.partition("#")
            slug = path.removeprefix("/help/") or page.slug
            if slug == "reference":
                continue
            assert slug in ids, (page.slug, address)
            assert not anchor or anchor in ids[slug], (page.slug, address)


def test_html_in_a_page_stays_text():
    rendered = render("# T\n\n<script>x</script>\n\n[a](../x.md) [b](javascript:y) `<b>`", resolve=lambda target: "")

    assert "<script>" not in rendered.html and "javascript:y" not in re.findall(r'href="([^"]*)"', rendered.html)
    assert "<a" not in rendered.html


def test_cells_are_aligned_by_class_and_repeated_headings_differ():
    rendered = render("# T\n\n## A\n\n## A\n\n|x|\n|--:|\n|1|\n", resolve=str)

    assert '<td class="align-right">1</td>' in rendered.html
    assert [section.anchor for section in rendered.sections] == ["a", "a-1"]


@pytest.mark.slow
def test_the_search_finds_pages_by_their_words(db, client: Client):
    assert "/help/datasets" in text(client.get("/help?q=gzip"))
    assert "No page has these words" in text(client.get("/help?q=zzzznothing"))
    assert "No page has these words" not in text(client.get("/help"))


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("anneal jobs watch", "/help/command-line#anneal-jobs-watch"),
        ("fine_tuning jobs checkpoints", "/help/reference#job_checkpoints_get"),
        ("pip install dist", "/help/command-line"),  # in a block of code
        ("invalid_training_file", "/help/errors#invalid_training_file"),
        ("quickstart", "/help/quickstart"),
    ],
)
def test_the_search_leads_to_commands_calls_and_codes(db, client: Client, words: str, address: str):
    assert f'href="{address}"' in text(client.get("/help", {"q": words}))


def test_every_view_with_a_prefix_exists():
    names = {
        f"{namespace}:{name}"
        for namespace in ("web", "staff")
        for name in get_resolver().namespace_dict[namespace][1].reverse_dict
        if isinstance(name, str)
    } | {name for name in get_resolver().reverse_dict if isinstance(name, str)}

    for page in PAGES:
        for prefix in page.views:
            assert any(name.startswith(prefix) for name in names), (page.slug, prefix)


@pytest.mark.parametrize(
    ("view", "slug"), [("web:job_detail", "training"), ("web:key_list", "inference"), ("staff:books", "billing")]
)
def test_a_page_of_the_product_opens_its_help(view, slug):
    found = page_of_view(view)

    assert found is not None and found.slug == slug


@pytest.mark.slow
def test_the_link_is_on_the_page(floor, alice, client_for):
    client = client_for(alice)

    assert 'href="/help/datasets"' in text(client.get("/datasets"))
    assert 'href="/help"' in text(client.get("/"))


def test_the_quickstart_names_the_readers_own_model_while_it_is_served(floor, claim, alice, client_for):
    client = client_for(alice)
    before = text(client.get("/help/quickstart"))
    job = floor.job()
    claim().succeed(floor.base_model)
    job.refresh_from_db()

    assert '"model": "anneal-demo"' in before
    name = job.adapter_version.model_name
    assert name in text(client.get("/help/quickstart"))
    undeploy(version=job.adapter_version, by="system", now=db_now())
    after = text(client.get("/help/quickstart"))
    assert name not in after and '"model": "anneal-demo"' in after


@pytest.mark.slow
def test_the_reference_has_every_call_of_the_document(db, client: Client):
    body = text(client.get("/help/reference"))
    document = client.get("/api/v1/schema").json()

    for path, methods in document["paths"].items():
        for described in methods.values():
            assert f'id="{described["operationId"]}"' in body
        assert path in body
    assert "recipe.epochs" in body  # a member of an object in a body


def test_the_image_of_the_web_has_the_file_of_every_page():
    image = (ROOT / "deploy/images/web.Dockerfile").read_text()
    copied = {name for line in image.splitlines() if line.startswith("COPY ") for name in line.split()[1:-1]}

    assert [page.file for page in PAGES if not copied & {page.file, page.file.partition("/")[0]}] == []


def test_an_unknown_page_is_not_found(db, client: Client):
    assert client.get("/help/nothing").status_code == 404
