"""The dataset pages, without script: what each kind of reader sees and may do."""

import re

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.urls import reverse

from apps.core.database.clock import db_now
from apps.core.models import AuditEntry, OutboxMessage
from apps.core.objects.store import store
from apps.datasets import operations
from apps.datasets.intake.revisions import NotRepairable, repair_version
from apps.datasets.models import DatasetVersion
from apps.datasets.validation.formats import FIELDS
from apps.datasets.validation.leases import validate_version
from apps.datasets.validation.repair import RepairMode
from apps.finetuning.usage.quotas import set_quota
from apps.interfaces.web.datasets.columns import FIELD_WORDS
from tests.factories.catalog import make_base_model
from tests.factories.chat import PAIR
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version, make_version
from tests.web.pages import page_of

pytestmark = pytest.mark.django_db
HTMX = {"HX-Request": "true"}


@pytest.fixture
def version(organization) -> DatasetVersion:
    make_base_model()
    return make_ready_version(organization, filename="cards.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("caller", "read", "write"), [("alice", 200, 200), ("bob", 200, 200), ("vera", 200, 403), ("charlie", 404, 404)]
)
def test_who_may_see_and_delete_a_file(request, version, rival, client_for, caller, read, write) -> None:
    client = client_for(request.getfixturevalue(caller))

    assert client.get(page_of(version)).status_code == read
    download = client.get(reverse("web:dataset_download", args=[version.pk]))
    assert download.status_code == (302 if read == 200 else read)
    delete = reverse("web:dataset_delete", args=[version.pk])
    assert client.get(delete).status_code == write
    deleted = client.post(delete, {"confirm": "cards.jsonl"})
    assert deleted.status_code == (302 if write == 200 else write)
    listed = client.get(reverse("web:dataset_list")).content.decode()
    assert (reverse("web:dataset_detail", args=[version.pk]) in listed) is (caller == "vera")


@pytest.mark.parametrize(("caller", "status"), [("alice", 302), ("bob", 302), ("vera", 403), ("charlie", 302)])
def test_who_may_upload(request, organization, rival, client_for, caller: str, status: int) -> None:
    client = client_for(request.getfixturevalue(caller))
    file = SimpleUploadedFile("new.jsonl", jsonl())

    response = client.post(reverse("web:dataset_upload"), {"file": file, "name": ""})

    assert response.status_code == status
    created = DatasetVersion.objects.filter(organization=organization).count()
    assert created == (1 if caller in ("alice", "bob") else 0)


@pytest.mark.parametrize("name", ["dataset_list", "dataset_upload"])
def test_a_stranger_is_sent_to_sign_in(client_for, db, name: str) -> None:
    response = client_for(None).get(reverse(f"web:{name}"))

    assert response.status_code == 302 and reverse("account_login") in response["Location"]


def test_an_upload_leads_to_the_file_and_is_recorded(organization, alice, client_for) -> None:
    response = client_for(alice).post(
        reverse("web:dataset_upload"), {"file": SimpleUploadedFile("new.jsonl", jsonl()), "name": "Tickets"}
    )

    version = DatasetVersion.objects.get()
    assert response["Location"] == reverse("web:dataset_detail", args=[version.pk])
    assert (version.dataset.name, version.filename, version.created_by) == ("Tickets", "new.jsonl", alice.pk)
    assert AuditEntry.objects.get(action="dataset.uploaded").actor == alice.pk


def test_an_upload_beyond_the_quota_comes_back_with_the_reason(organization, alice, olga, client_for) -> None:
    set_quota(organization=organization, by=olga.pk, now=db_now(), storage_bytes=10)

    response = client_for(alice).post(reverse("web:dataset_upload"), {"file": SimpleUploadedFile("a.jsonl", jsonl())})

    assert response.status_code == 422
    assert "bytes of storage left" in response.content.decode()


def test_an_empty_list_shows_the_command_and_a_sample(alice, organization, client_for) -> None:
    body = client_for(alice).get(reverse("web:dataset_list")).content.decode()

    assert "/v1/files" in body and "samples/banking-questions.jsonl" in body


def test_the_sample_file_is_valid(organization) -> None:
    from apps.config.env import ROOT

    assert (
        make_ready_version(organization, (ROOT / "static/samples/banking-questions.jsonl").read_bytes()).status
        == "ready"
    )


@pytest.mark.slow
def test_the_list_names_counts_and_state(version, alice, client_for) -> None:
    client_for(alice).get(page_of(version))

    body = client_for(alice).get(reverse("web:dataset_list")).content.decode()

    assert "cards" in body and "Ready" in body and "Anneal demo" in body


def test_the_list_looks_again_while_a_file_is_checked(version, organization, alice, client_for) -> None:
    make_version(organization, filename="new.jsonl")

    page = client_for(alice).get(reverse("web:dataset_list")).content.decode()
    part = client_for(alice).get(reverse("web:dataset_list"), headers=HTMX).content.decode()

    assert 'hx-trigger="every 3s"' in page
    assert part.lstrip().startswith('<div id="files"') and "<html" not in part


def test_a_row_is_shown_as_the_model_sees_it(version, alice, client_for) -> None:
    body = client_for(alice).get(page_of(version, line=3)).content.decode()

    assert "Where is card 2?" in body
    assert re.search(r"<mark>card_arrival<span class=\"sp\">&lt;\|end\|&gt;</span></mark>", body)
    assert '<span class="sp">&lt;|user|&gt;</span>' in body


@pytest.mark.parametrize(
    ("view", "text"), [("tokens", '<mark class="tk sp">&lt;|end|&gt;</mark>'), ("json", "&quot;messages&quot;: [")]
)
def test_tokens_and_json_are_links_away(version, alice, client_for, view: str, text: str) -> None:
    assert text in client_for(alice).get(page_of(version, view=view)).content.decode()


def test_a_row_of_a_thousand_levels_is_shown_as_it_was_sent(organization, alice, client_for) -> None:
    version = make_version(organization, content=b'{"messages": ' + b"[" * 1_500 + b"]" * 1_500 + b"}\n")
    validate_version(version_id=version.pk, now=db_now())

    assert "[[[[" in client_for(alice).get(page_of(version, view="json")).content.decode()


def test_htmx_gets_the_viewer_alone(version, alice, client_for) -> None:
    response = client_for(alice).get(page_of(version, line=2), headers=HTMX | {"HX-Target": "section#viewer"})

    body = response.content.decode()
    assert body.lstrip().startswith("<section") and "Where is card 1?" in body
    assert "HX-Request" in response["Vary"]


def test_a_bad_file_lists_its_errors_with_lines_and_fixes(organization, alice, client_for) -> None:
    make_base_model()
    content = jsonl() + b'{"messages": [{"role": "robot", "content": "<b>x</b>"}]}\n'
    version = make_ready_version(organization, content)

    body = client_for(alice).get(page_of(version)).content.decode()

    assert "Line 13:<code>messages[0]</code>has the role<code>robot</code>." in body
    assert "Use system, developer, user, assistant or tool." in body
    assert "line=13" in body
    shown = client_for(alice).get(page_of(version, line=13)).content.decode()
    assert "&lt;b&gt;x&lt;/b&gt;" in shown and "<b>x</b>" not in shown


def test_a_file_being_checked_looks_again_by_itself(organization, alice, client_for) -> None:
    version = make_version(organization)

    page = client_for(alice).get(page_of(version)).content.decode()
    part = client_for(alice).get(page_of(version), headers=HTMX | {"HX-Target": "div#dataset"}).content.decode()

    assert 'hx-trigger="every 2s"' in page
    assert part.lstrip().startswith("<div") and "<html" not in part


def test_a_row_the_model_cannot_read_is_said_in_the_checks(organization, alice, client_for) -> None:
    make_base_model()
    version = make_ready_version(organization, jsonl() + jsonl(1).replace(b"Where", b"<|end|>"))

    body = client_for(alice).get(page_of(version)).content.decode()

    assert "Line 13: The text holds" in body


@pytest.mark.slow
def test_a_large_file_is_counted_by_a_task(version, alice, client_for, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "COUNT_NOW_BYTES", 10)

    for _ in range(2):
        body = client_for(alice).get(page_of(version)).content.decode()

    assert "counting…" in body
    assert OutboxMessage.objects.filter(topic="dataset.count").count() == 1


def test_a_page_works_before_any_model_is_installed(organization, alice, client_for) -> None:
    response = client_for(alice).get(page_of(make_ready_version(organization)))

    assert response.status_code == 200
    assert "Where is card 0?" in response.content.decode()


@pytest.mark.slow
def test_no_query_breaks_the_page(version, alice, client_for) -> None:
    client = client_for(alice)
    for query in (
        "line=0", "line=99999999999", "line=x", "first=-1", "view=<b>", "model=nope", "line=500", "limit=7", "share=99",
        "share=5&seed=x", "find=<b>", "find=over&first=9", "find=held_out",
    ):  # fmt: skip
        assert client.get(f"{page_of(version)}{query}").status_code == 200, query


def test_a_download_is_a_signed_link_and_recorded(version, alice, client_for) -> None:
    response = client_for(alice).get(reverse("web:dataset_download", args=[version.pk]))

    assert response["Location"].startswith("http://testserver/objects/org/") and "signature=" in response["Location"]
    assert "filename=cards.jsonl" in response["Location"]
    assert AuditEntry.objects.get(action="dataset.downloaded").target == version.pk


def test_deleting_asks_for_the_name(version, alice, client_for) -> None:
    response = client_for(alice).post(reverse("web:dataset_delete", args=[version.pk]), {"confirm": "cards"})

    assert response.status_code == 422
    version.refresh_from_db()
    assert version.status == "ready"


TABLE = b"utterance,label\n" + b"Hi,greeting\n" * 12
CHOICE = {"format": "prompt_completion", "for": "prompt_completion", "column.prompt": "utterance"}


def test_columns_are_chosen_with_a_preview(organization, alice, client_for) -> None:
    version = make_ready_version(organization, TABLE, filename="a.csv")
    client, url = client_for(alice), reverse("web:dataset_columns", args=[version.pk])

    assert "Choose columns" in client.get(page_of(version)).content.decode()
    shown = client.get(url).content.decode()
    incomplete = client.post(url, CHOICE)
    preview = client.post(url, CHOICE | {"column.completion": "label", "action": "preview"})
    chosen = client.post(url, CHOICE | {"column.completion": "label"})

    assert "utterance" in shown and "Prompt and completion" in shown
    assert incomplete.status_code == 422 and "completion" in incomplete.content.decode()
    assert preview.status_code == 200 and "&quot;content&quot;:&quot;greeting&quot;" in preview.content.decode()
    assert chosen.status_code == 302 and chosen["Location"] == reverse("web:dataset_detail", args=[version.pk])
    version.refresh_from_db()
    assert (version.status, version.given_mapping["columns"]["completion"]) == ("uploaded", "label")


@pytest.mark.parametrize("format", ["", "sharegpt", "nonsense", "text"])
def test_every_format_can_be_looked_at(version, alice, client_for, format: str) -> None:
    response = client_for(alice).get(reverse("web:dataset_columns", args=[version.pk]), {"format": format})

    assert response.status_code == 200


def test_fields_of_a_format_are_named_in_the_readers_language_too(organization, alice, client_for) -> None:
    url = reverse("web:dataset_columns", args=[make_ready_version(organization, jsonl()).pk])
    english, german = (
        client_for(alice)
        .get(url, {"format": "preference_pairs"}, headers={"Accept-Language": language})
        .content.decode()
        for language in ("en", "de")
    )

    assert "Chosen" in english and "(chosen)" not in english
    assert "Bevorzugt (chosen)" in german and "System (" not in german
    assert {field.name.replace("_", " ") for fields in FIELDS.values() for field in fields} == set(FIELD_WORDS)


@pytest.mark.slow
def test_rows_are_fixed_or_removed_only_after_their_numbers_are_shown(organization, alice, client_for) -> None:
    make_base_model()
    version = make_ready_version(organization, jsonl() + jsonl_of(chat_row("Hi") | {"id": 4}) + b"{broken\n")
    client, repair = client_for(alice), reverse("web:dataset_repair", args=[version.pk])
    page = client.get(page_of(version)).content.decode()
    fix, remove = (client.get(repair, {"mode": mode}).content.decode() for mode in ("repair", "drop"))

    assert (
        f'href="{repair}?mode=repair"' in page and "Fix or remove 2 rows" in page and f'action="{repair}"' not in page
    )
    assert f'href="{repair}?mode=drop"' in page and "Remove 2 rows" in page
    assert "Save as new version: 1 fixed, 1 removed" in fix and "you can go back" in fix
    assert "Save as new version: 2 removed" in remove
    version.error_count = 1_234
    version.save()
    assert "Save as new version: 1,234 fixed or removed" in client.get(repair).content.decode()


@pytest.mark.slow
def test_bad_rows_are_dropped_with_one_form(organization, alice, client_for) -> None:
    make_base_model()
    version = make_ready_version(organization, jsonl() + b"{broken\n")
    client = client_for(alice)
    response = client.post(reverse("web:dataset_repair", args=[version.pk]), {"mode": "drop"})
    made = DatasetVersion.objects.get(derived_from=version)
    validate_version(version_id=made.pk, now=db_now())

    assert response["Location"] == reverse("web:dataset_detail", args=[made.pk])
    body = client.get(page_of(made)).content.decode()
    assert "Repaired from" in body and "1 left out" in body


def test_a_browser_upload_is_planned_signed_and_completed(organization, alice, client_for) -> None:
    client = client_for(alice)
    ask = {"filename": "big.jsonl", "bytes": len(jsonl()), "name": "Big"}

    plan = client.post(reverse("web:dataset_upload_create"), ask, content_type="application/json").json()
    base = [plan["id"]]
    sign = reverse("web:dataset_upload_sign", args=base)
    urls = client.post(sign, {"numbers": [1]}, content_type="application/json").json()["urls"]
    early = client.post(reverse("web:dataset_upload_complete", args=base))
    store().put_stream(urls["1"].split("/objects/")[1].split("?")[0], [jsonl()])
    state = client.get(reverse("web:dataset_upload_state", args=base)).json()
    done = client.post(reverse("web:dataset_upload_complete", args=base)).json()

    assert (plan["parts"], plan["present"], state["present"]) == (1, [], [1])
    assert early.status_code == 400 and "missing" in early.json()["error"]["message"]
    assert done["url"] == reverse("web:dataset_detail", args=[DatasetVersion.objects.get().pk])
    assert DatasetVersion.objects.get().dataset.name == "Big"
    closed = client.post(reverse("web:dataset_upload_cancel", args=base))
    assert (closed.status_code, closed.json()["error"]["code"]) == (400, "upload_closed")
    wrong = client.post(reverse("web:dataset_upload_create"), {"bytes": "x"}, content_type="application/json")
    assert wrong.status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["preference", "text"])
def test_rows_of_other_kinds_are_shown_as_they_are_trained(organization, alice, client_for, kind: str) -> None:
    make_base_model()
    row = PAIR if kind == "preference" else {"text": "Once upon a time."}
    version = make_ready_version(organization, jsonl_of(row) * 12)

    body = client_for(alice).get(page_of(version)).content.decode()

    if kind == "preference":
        assert "<b>preferred</b>" in body and "<b>not preferred</b>" in body
        assert "<mark>On its way." in body and "<mark>No idea." in body
    else:
        assert "<b>text</b>" in body and "<mark>Once upon a time." in body


def test_only_a_file_with_bad_rows_offers_to_repair_them(organization, alice, client_for) -> None:
    short, bad = make_ready_version(organization, jsonl(4)), make_ready_version(organization, jsonl() + b"{}\n")
    pages = [
        client_for(alice).get(reverse("web:dataset_detail", args=[version.pk])).content.decode()
        for version in (short, bad)
    ]

    assert ["Fix or remove 1 row" in page for page in pages] == [False, True]
    with pytest.raises(NotRepairable, match="too few"):
        repair_version(version=short, mode=RepairMode.DROP, by=alice.pk, now=db_now())
