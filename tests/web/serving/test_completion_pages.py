"""The pages of stored completions: the list, one completion, deletion, and a dataset of what is listed."""

import re

import msgspec
import pytest

from apps.batches.completions.models import StoredCompletion
from apps.batches.completions.records import record_completions
from apps.core.database.clock import db_now
from apps.core.objects.store import read_object
from apps.datasets.models import DatasetVersion
from tests.factories.usage import make_completion
from tests.support.pages import csv_rows, text


@pytest.fixture
def stored(organization) -> list[str]:
    """Three completions: two of one topic, the second of another model."""
    made = []
    for number, (model, topic) in enumerate((("tiny", "size"), ("other", "size"), ("tiny", "items"))):
        asked = {"role": "user", "content": f"Question {number}?"}
        request = {"messages": [{"role": "system", "content": "Be brief."}, asked], "temperature": 0.5}
        answer = {"role": "assistant", "content": f"Answer {number} <b>."}
        made.append(
            make_completion(
                organization_id=organization.pk, model_name=model, created=1_762_000_000 + number,
                metadata={"topic": topic, "items": "1"}, request=msgspec.Raw(msgspec.json.encode(request)),
                answer=msgspec.Raw(
                    msgspec.json.encode({"choices": [{"message": answer}], "usage": {"prompt_tokens": 1_234}})
                ),
            )
        )  # fmt: skip
    record_completions(records=made)
    return [each.id for each in made]


@pytest.mark.slow
def test_completions_are_searched_filtered_sorted_and_opened(stored, client_for, vera, charlie, rival):
    browser = client_for(vera)
    StoredCompletion.objects.filter(pk=stored[1]).update(bytes=9_999, created_at=db_now())
    StoredCompletion.objects.filter(pk=stored[0]).update(metadata={"topic": "size", "items": "1", "says": "two words"})
    for query, numbers in (("", "120"), ("?sort=oldest", "021"), ("?sort=size", "120"), ("?since=week", "1"),
                           ("?model=tiny", "20"), ("?model=gone", ""), ("?q=topic%3Dsize items%3D1", "10"),
                           ("?q=topic%3Dsiz", ""), ("?q=siz", "10"), ("?model=other&q=topic%3Ditems", ""),
                           (f"?q={stored[2]}", "2"),
                           ('?q=says%3D"two words"', "0"), ("?q=says%3Dtwo words", "")):  # fmt: skip
        page = text(browser.get(f"/stored-completions{query}"))
        assert re.findall(r"Question (\d)\?", page) == list(numbers), query
    browser.post("/views", {"listing": "web:completion_list", "name": "sizes", "query": "q=topic%3Dsize"})
    listed = browser.get("/stored-completions").content.decode()
    assert 'href="/stored-completions?q=topic%3Dsize"' in listed and 'or name=&quot;two words&quot;"' in listed

    one = text(browser.get(f"/stored-completions/{stored[0]}"))

    for words in ("Be brief.", "Question 0?", "Answer 0 <b>.", "1,234", "temperature", "topic"):
        assert words in one
    assert "Answer 0 <b>" not in browser.get(f"/stored-completions/{stored[0]}").content.decode()
    assert "/stored-completions/delete" not in one and "Save as dataset" not in text(browser.get("/stored-completions"))
    outsider = client_for(charlie)
    assert "Question" not in text(outsider.get("/stored-completions"))
    assert outsider.get(f"/stored-completions/{stored[0]}").status_code == 404
    assert client_for(None).get("/stored-completions").status_code == 302


def test_members_delete_completions_after_a_second_look(stored, client_for, bob, vera, charlie, rival):
    chosen = {"completion": stored[:2], "confirm": "2 stored completions"}
    for person, status in ((vera, 403), (charlie, 404), (None, 302)):
        assert client_for(person).post("/stored-completions/delete", chosen).status_code == status
    browser = client_for(bob)
    assert "Delete 2 stored completions?" in text(browser.get("/stored-completions/delete", {"completion": stored[:2]}))

    assert browser.post("/stored-completions/delete", chosen)["Location"] == "/stored-completions"

    assert list(StoredCompletion.objects.filter(deleted_at=None).values_list("pk", flat=True)) == stored[2:]
    page = text(browser.get("/stored-completions"))
    assert "Question 2?" in page and "Question 0?" not in page
    assert browser.get(f"/stored-completions/{stored[0]}").status_code == 404


def test_what_is_listed_becomes_a_dataset(stored, client_for, bob, vera):
    url = "/stored-completions/dataset?model=tiny"
    assert client_for(vera).post(url, {"name": "kept"}).status_code == 403
    browser = client_for(bob)
    assert f'action="{url}"' in text(browser.get("/stored-completions?model=tiny"))
    unnamed, none = (
        browser.post(url, {"name": ""}),
        browser.post("/stored-completions/dataset?model=gone", {"name": "kept"}),
    )
    assert unnamed.status_code == 422 and 'id="id_name_error"' in text(unnamed)
    assert none.status_code == 422 and "No stored completion that the dataset may contain has this model" in text(none)
    assert not DatasetVersion.objects.exists()

    made = browser.post(url, {"name": "kept"})

    version = DatasetVersion.objects.get()
    assert made["Location"] == f"/datasets/{version.pk}" and version.dataset.name == "kept"
    rows = [msgspec.json.decode(line) for line in read_object(version.object_key, limit_bytes=10_000).splitlines()]
    assert [row["messages"][-1]["content"] for row in rows] == ["Answer 2 <b>.", "Answer 0 <b>."]


def test_what_is_listed_is_a_table_with_questions_and_answers(stored, client_for, vera, charlie, rival):
    browser = client_for(vera)
    assert 'href="/stored-completions/export?model=tiny"' in text(browser.get("/stored-completions?model=tiny"))

    rows = csv_rows(browser.get("/stored-completions/export?model=tiny"))

    assert [(row["question"], row["answer"]) for row in rows] == [
        ("Question 2?", "Answer 2 <b>."), ("Question 0?", "Answer 0 <b>."),
    ]  # fmt: skip
    assert rows[0]["model"] == "tiny" and '"topic":"items"' in rows[0]["metadata"]
    oldest = csv_rows(browser.get("/stored-completions/export?sort=oldest&q=topic%3Dsize"))
    assert [row["question"] for row in oldest] == ["Question 0?", "Question 1?"]
    assert csv_rows(client_for(charlie).get("/stored-completions/export")) == []
    assert client_for(None).get("/stored-completions/export").status_code == 302
