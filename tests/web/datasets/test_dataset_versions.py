"""The versions of a dataset: compared row by row, repaired after a preview, and restored."""

import re

import pytest
from django.contrib.messages import get_messages
from django.urls import reverse

from apps.contracts.splits.split import Split
from apps.core.database.clock import db_now
from apps.core.models import OutboxMessage
from apps.core.objects.store import read_object, store
from apps.datasets.inspection import changes
from apps.datasets.inspection.inspections import find_inspection, held_out_rows
from apps.datasets.models import DatasetVersion
from apps.datasets.tasks import compare_rows, inspect
from apps.datasets.validation.leases import validate_version
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version
from tests.web.pages import page_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def pair(organization) -> tuple[DatasetVersion, DatasetVersion]:
    """Two versions: one row changed, one added at the end."""
    rows = [chat_row(f"Where is card {n}?") for n in range(12)]
    first = make_ready_version(organization, jsonl_of(*rows), filename="cards.jsonl")
    rows[2] = chat_row("Where is <b>my</b> car?")
    second = make_ready_version(organization, jsonl_of(*rows, chat_row("One more")), filename="cards.jsonl")
    return first, second


NEWER = "A newer version was saved meanwhile. Look at it first."


def fields_of(body: str) -> dict[str, str]:
    """The hidden fields of a page's forms."""
    return dict(re.findall(r'type="hidden"\s+name="(mode|newest)"\s+value="(\w+)"', body))


def page(name: str, version: DatasetVersion, query: str = "") -> str:
    return reverse(f"web:dataset_{name}", args=[version.pk]) + query


def test_two_versions_are_compared_before_and_after(pair, alice, client_for) -> None:
    first, second = pair
    client = client_for(alice)

    changed = client.get(page("changes", second)).content.decode()
    added = client.get(page("changes", second, "?show=added")).content.decode()
    removed = client.get(page("changes", first, f"?since={second.pk}&show=removed")).content.decode()

    assert re.findall(r'(\w+)<span\s*class="count"\s*>(\d+)</span>', changed) == [
        ("Changed", "1"), ("Added", "1"), ("Removed", "0"),
    ]  # fmt: skip
    assert "Where is card 2?" in changed and "Where is &lt;b&gt;my&lt;/b&gt; car?" in changed
    assert "One more" in added and "Not in version 1" in added
    assert "One more" in removed and "Not in version 1" in removed
    assert page("changes", second) in client.get(page_of(second)).content.decode()


def test_a_file_of_another_dataset_or_organization_is_not_compared(
    pair, organization, rival, alice, client_for
) -> None:
    other, foreign = (make_ready_version(each, filename="other.jsonl") for each in (organization, rival))

    for since in (other, foreign):
        assert client_for(alice).get(page("changes", pair[1], f"?since={since.pk}")).status_code == 404
    assert "No other version" in client_for(alice).get(page("changes", other)).content.decode()


def test_large_versions_are_compared_by_a_task_and_the_page_looks_again(pair, alice, client_for, monkeypatch) -> None:
    monkeypatch.setattr(changes, "CHANGES_NOW_BYTES", 10)
    first, second = pair
    client = client_for(alice)

    for _ in range(2):
        waiting = client.post(page("changes", second)).content.decode()
    compare_rows(second.pk, first.pk)
    done = client.get(page("changes", second), headers={"HX-Request": "true"}).content.decode()

    assert 'every 2s"' in waiting
    assert OutboxMessage.objects.filter(topic="dataset.changes").count() == 1
    assert done.lstrip().startswith("<div") and "Where is card 2?" in done and 'every 2s"' not in done


def test_long_lists_of_changes_have_pages(organization, alice, client_for) -> None:
    make_ready_version(organization, jsonl(12))
    version = make_ready_version(organization, jsonl(37))
    client = client_for(alice)

    first = client.get(page("changes", version)).content.decode()
    last = client.get(page("changes", version, "?show=added&skip=20")).content.decode()

    assert first.count("Not in version 1") == 10 and "skip=10" in first
    assert last.count("Not in version 1") == 5 and "Where is card 36?" in last


# --- repairs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(organization) -> DatasetVersion:
    bad = [chat_row("Hi") | {"id": 4}, {"messages": [{"role": "user", "content": "Hi"}]}]
    return make_ready_version(organization, jsonl(12) + jsonl_of(*bad))


def test_a_repair_is_previewed_row_by_row_and_applied_from_there(broken, alice, client_for) -> None:
    client = client_for(alice)
    assert page("repair", broken) in client.get(page_of(broken)).content.decode()

    fixed = client.get(page("repair", broken)).content.decode()
    dropped = client.get(page("repair", broken, "?mode=drop")).content.decode()

    assert "2 rows with errors" in fixed and fixed.count("Left out") == 1 and dropped.count("Left out") == 2
    assert "&quot;id&quot;: 4" in fixed
    assert DatasetVersion.objects.count() == 1, "a preview changes nothing"
    form = fields_of(dropped)
    assert form["mode"] == "drop"
    for _ in range(2):
        sent = client.post(page("repair", broken), form)
    assert DatasetVersion.objects.get(number=2).repair == "drop"
    assert [str(each) for each in get_messages(sent.wsgi_request)] == [NEWER]
    assert DatasetVersion.objects.count() == 2, "sent twice"


def test_a_file_without_errors_has_nothing_to_repair(pair, alice, client_for) -> None:
    assert "Nothing to repair" in client_for(alice).get(page("repair", pair[1])).content.decode()


@pytest.mark.slow
def test_a_repair_is_undone_by_a_copy_of_what_it_repaired(broken, alice, client_for) -> None:
    client = client_for(alice)
    client.post(page("repair", broken), {"mode": "repair"})
    repaired = DatasetVersion.objects.get(number=2)
    validate_version(version_id=repaired.pk, now=db_now())
    body = client.get(page_of(repaired)).content.decode()
    assert "Go back to version 1" in body

    form = fields_of(body)
    restored = client.post(page("restore", broken), form)
    refused = client.post(page("restore", broken), form)

    assert [str(each) for each in get_messages(refused.wsgi_request)][-1] == NEWER
    copy = DatasetVersion.objects.get(number=3)
    assert restored["Location"] == page("detail", copy)
    validate_version(version_id=copy.pk, now=db_now())
    copy.refresh_from_db()
    assert (copy.sha256, copy.error_count) == (broken.sha256, 2)
    older = client.get(page_of(repaired)).content.decode()
    assert "Restore version 2" in older and "Go back to version 1" not in older


@pytest.mark.slow
def test_the_newest_version_is_not_restored(pair, alice, vera, client_for) -> None:
    client = client_for(alice)

    refused = client.post(page("restore", pair[1]))

    assert [str(each) for each in get_messages(refused.wsgi_request)] == ["Version 2 is the newest version already."]
    assert DatasetVersion.objects.count() == 2
    assert client_for(vera).post(page("restore", pair[0])).status_code == 403
    assert "Restore version" not in client_for(vera).get(page_of(pair[0])).content.decode()


# --- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_split_by_share_and_seed_becomes_two_datasets(organization, alice, client_for) -> None:
    version = make_ready_version(organization, jsonl(99) + jsonl(1), filename="cards.jsonl")
    inspect(version.pk)
    client = client_for(alice)
    assert page("split", version) in client.get(page_of(version, share=20)).content.decode()

    made = client.post(page("split", version), {"share": "20", "seed": "7"})

    trained, held = DatasetVersion.objects.exclude(pk=version.pk).order_by("dataset__name")
    assert made["Location"] == page_of(trained, share=0, against=held.pk)
    for part in (trained, held):
        validate_version(version_id=part.pk, now=db_now())
        part.refresh_from_db()
    inspection = find_inspection(version=version)
    assert inspection is not None
    marks = held_out_rows(inspection=inspection, split=Split(0.2, 7))
    lines = (jsonl(99) + jsonl(1)).splitlines()
    for part, name, is_held in ((trained, "cards training", False), (held, "cards validation", True)):
        assert (part.dataset.name, part.status) == (name, "ready")
        kept = [line for line, mark in zip(lines, marks, strict=True) if mark == is_held]
        assert read_object(part.object_key).splitlines() == kept
    assert "The validation rows of cards,<a" in client.get(page_of(held)).content.decode()


@pytest.mark.parametrize(
    ("share", "seed", "words"),
    [
        ("5", "1", "Seed 1 holds out 7 rows and leaves 93 to train on, and each file needs at least 10."),
        ("10", "6", "Seed 6 holds out 7 rows and leaves 93 to train on"),
        ("0", "1", "Choose a share"),
        ("60", "1", "Choose a share"),
        ("x", "1", "Choose"),
    ],
)
def test_a_split_that_leaves_too_few_rows_is_refused(organization, alice, client_for, share, seed, words) -> None:
    version = make_ready_version(organization, jsonl(100))
    inspect(version.pk)
    form = {"share": share, "seed": seed}

    body = client_for(alice).post(page("split", version), form, follow=True).content.decode()

    assert words in body and DatasetVersion.objects.count() == 1


def test_a_split_without_the_stored_keys_of_the_rows_says_so(organization, alice, client_for) -> None:
    version = make_ready_version(organization, jsonl(100))
    inspect(version.pk)
    inspection = find_inspection(version=version)
    assert inspection is not None
    store().delete(inspection.identities_key)

    client = client_for(alice)
    body = client.post(page("split", version), {"share": "20", "seed": "7"}, follow=True).content.decode()

    assert "The rows of the file were not inspected." in body and DatasetVersion.objects.count() == 1
