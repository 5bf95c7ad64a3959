"""What a dataset's page says of its rows: findings, the limit, the split, and what repeats a validation file."""

import html
import re

import pytest

from apps.catalog.models import BaseModel
from apps.contracts.splits.split import Split
from apps.core.models import OutboxMessage
from apps.datasets.inspection import comparisons
from apps.datasets.inspection.inspections import find_inspection, held_out_rows
from apps.datasets.models import DatasetVersion
from apps.datasets.tasks import compare, inspect
from apps.finetuning.models import FineTuningJob
from tests.factories.catalog import make_base_model
from tests.factories.datasets import chat_row, jsonl, jsonl_of, make_ready_version
from tests.factories.finetuning import TrainingSetup
from tests.web.pages import page_of

pytestmark = pytest.mark.django_db
LONG = "My card has not arrived although you said last week that it would be here by monday morning"


@pytest.fixture
def looked_at(organization) -> DatasetVersion:
    """Fourteen rows: a copy, a near copy, an e-mail address, a row too long for 256 tokens."""
    make_base_model()
    rows = [chat_row(f"Where is card {n}?") for n in range(10)]
    rows += [chat_row(LONG), chat_row(LONG.upper()), chat_row(LONG + " at nine"), chat_row("word " * 400)]
    rows[3] = chat_row("Write to mira@example.com about it, please.")
    version = make_ready_version(organization, jsonl_of(*rows))
    inspect(version.pk)
    return version


@pytest.mark.slow
def test_findings_are_listed_and_lead_to_their_rows(looked_at, alice, client_for) -> None:
    body = client_for(alice).get(page_of(looked_at, limit=256)).content.decode()

    assert "1 row repeats an earlier row" in body
    assert "1 row is nearly the same as an earlier one" in body
    assert "1 row may contain an email address" in body
    assert "1 row over 256 tokens will be cut" in body
    assert "1 row of these trains nothing and is left out" in body
    for code, line in (("exact_copy", 12), ("near_copy", 13), ("personal_email", 4), ("over", 14), ("untrained", 14)):
        shown = client_for(alice).get(page_of(looked_at, limit=256, find=code)).content.decode()
        assert re.findall(r'<span class="n">(\d+)</span>', shown) == [str(line)], code


@pytest.mark.slow
def test_the_page_begins_at_the_limit_that_training_takes(looked_at, organization, alice, client_for) -> None:
    BaseModel.objects.update(default_recipe={"max_length": 256})
    short = make_ready_version(organization, jsonl(12), filename="short.jsonl")
    page = client_for(alice).get(page_of(short)).content.decode()
    assert "Every row fits in 256 tokens" in page
    assert "max_length" not in re.search(r'href="(/jobs/new[^"]*)"', page)[1]
    longer = client_for(alice).get(page_of(short, limit=512)).content.decode()
    assert "max_length=512" in re.search(r'href="(/jobs/new[^"]*)"', longer)[1]

    assert "Every row fits in 512 tokens" in client_for(alice).get(page_of(looked_at)).content.decode()


@pytest.mark.slow
def test_what_lies_beyond_the_limit_is_struck_out_and_not_trained(looked_at, alice, client_for) -> None:
    short = client_for(alice).get(page_of(looked_at, limit=256, line=14)).content.decode()
    whole = client_for(alice).get(page_of(looked_at, line=14)).content.decode()

    assert '<s class="beyond">' in short and "0 trained" in short and "nothing trained" in short
    assert '<s class="beyond">' not in whole and "<mark>card_arrival" in whole


@pytest.mark.slow
def test_the_split_of_a_share_and_seed_is_shown(looked_at, alice, client_for) -> None:
    body = client_for(alice).get(page_of(looked_at, share=20, seed=7)).content.decode()

    inspection = find_inspection(version=looked_at)
    assert inspection is not None
    held = held_out_rows(inspection=inspection, split=Split(0.2, 7))
    assert f"{held.count(False)} train, {sum(held)} held out" in body
    assert body.count(">held out</span>") == sum(held)
    assert "&amp;validation_share=0.2&amp;seed=7" in body
    listed = client_for(alice).get(page_of(looked_at, share=20, seed=7, find="held_out")).content.decode()
    lines = [int(line) for line in re.findall(r'<span class="n">(\d+)</span>', listed)]
    assert lines == [at for at, is_held in enumerate(held, 1) if is_held]


@pytest.mark.slow
def test_flags_stand_at_their_rows_between_blank_lines(organization, alice, client_for) -> None:
    """Rows are numbered without blank lines, and lines with them."""
    make_base_model()
    version = make_ready_version(organization, b"\n" + jsonl_of(*(chat_row(f"Where is {n}?") for n in range(14))))
    inspect(version.pk)
    inspection = find_inspection(version=version)
    assert inspection is not None
    held = [at for at, is_held in enumerate(held_out_rows(inspection=inspection, split=Split(0.2, 7)), 2) if is_held]
    other = make_ready_version(organization, jsonl(11) + jsonl_of(chat_row("Where is 13?")), filename="held.jsonl")
    client = client_for(alice)

    body = client.get(page_of(version, share=20, seed=7)).content.decode()
    listed = client.get(page_of(version, share=20, seed=7, find="held_out")).content.decode()
    shared = client.get(page_of(version, against=other.pk, find="shared")).content.decode()

    assert flagged_lines(body, "held out") == held == lines_of(listed)
    assert lines_of(shared) == flagged_lines(shared, "in both") == [15]


def lines_of(page: str) -> list[int]:
    return [int(line) for line in re.findall(r'<span class="n">(\d+)</span>', page)]


def flagged_lines(page: str, flag: str) -> list[int]:
    parts = re.split(r'(?=<span class="n">)', page)[1:]
    return [int(lines_of(part)[0]) for part in parts if f">{flag}</span>" in part.partition("</a>")[0]]


@pytest.mark.slow
def test_the_page_begins_with_the_split_that_training_makes(organization, alice, client_for) -> None:
    make_base_model()
    version = make_ready_version(organization, jsonl(500))
    inspect(version.pk)
    client = client_for(alice)

    usual = client.get(page_of(version)).content.decode()
    none = client.get(page_of(version, share=0)).content.decode()

    inspection = find_inspection(version=version)
    assert inspection is not None
    held = held_out_rows(inspection=inspection, split=Split(0.05, 42))
    assert f"{held.count(False)} train, {sum(held)} held out" in usual
    assert "validation_share" not in re.search(r'href="(/jobs/new[^"]*)"', usual)[1]
    assert ">held out</span>" not in none
    assert "validation_share=0.0" in re.search(r'href="(/jobs/new[^"]*)"', none)[1]
    row = re.search(rf'href="([^"]*{version.pk}[^"]*line=2[^"]*)"', none)[1]
    assert "share=0" in row, "the next row keeps the choice"


@pytest.mark.slow
def test_what_repeats_a_validation_file_is_counted_flagged_and_listed(
    looked_at, organization, rival, alice, client_for
) -> None:
    held = jsonl(12) + jsonl_of(chat_row(LONG + " again"))
    held_out = make_ready_version(organization, held, filename="held.jsonl")

    body = client_for(alice).get(page_of(looked_at, against=held_out.pk)).content.decode()

    assert "9 rows stand in the validation file too" in body
    assert "3 rows nearly repeat one of the validation file" in body
    assert body.count("They are not trained on.") == 2
    assert f"&amp;validation={held_out.pk}" in body, "the wizard is told"
    for find, flag, count in (("shared", "in both", 9), ("nearly_shared", "nearly in both", 3)):
        listed = client_for(alice).get(page_of(looked_at, against=held_out.pk, find=find)).content.decode()
        assert listed.count(f">{flag}</span>") == count == len(re.findall(r'<span class="n">', listed))
    foreign = make_ready_version(rival)
    assert client_for(alice).get(page_of(looked_at, against=foreign.pk)).status_code == 404


@pytest.mark.slow
def test_a_file_that_a_job_validated_with_is_compared_by_name_and_what_it_shares_is_listed(
    organization, alice, client_for
) -> None:
    job = TrainingSetup(organization).job()
    version = make_ready_version(organization, jsonl(9) + jsonl_of(chat_row(LONG), chat_row("Something else.")))
    held_out = make_ready_version(organization, jsonl(12), filename="held.jsonl")
    FineTuningJob.objects.filter(pk=job.pk).update(training_file=version, validation_file=held_out)
    inspect(version.pk)
    compare(version.pk, held_out.pk)

    body = client_for(alice).get(page_of(version)).content.decode()

    assert "9 rows stand in held.jsonl too" in body
    link = re.search(r'href="([^"]*find=shared&[^"]*|[^"]*find=shared)"', body)
    assert link and f"against={held_out.pk}" in link[1]
    listed = client_for(alice).get(html.unescape(link[1])).content.decode()
    assert listed.count(">in both</span>") == 9


@pytest.mark.slow
def test_large_files_are_compared_by_a_task_and_the_page_looks_again(
    looked_at, organization, alice, client_for, monkeypatch
) -> None:
    monkeypatch.setattr(comparisons, "COMPARE_NOW_ROWS", 10)
    held_out = make_ready_version(organization, jsonl(12), filename="held.jsonl")
    page = page_of(looked_at, against=held_out.pk)

    before = client_for(alice).get(page).content.decode()
    compare(looked_at.pk, held_out.pk)
    after = client_for(alice).get(page).content.decode()

    assert "checking the rows" in before and 'every 2s"' in before
    assert "9 rows stand in the validation file too" in after and 'every 2s"' not in after


@pytest.mark.slow
def test_rows_can_be_looked_at_as_a_recipe_trains_them_that_trains_inputs(looked_at, alice, client_for) -> None:
    answers = client_for(alice).get(page_of(looked_at, line=2)).content.decode()
    everything = client_for(alice).get(page_of(looked_at, line=2, train_on="all")).content.decode()

    def figures(body: str) -> list[str]:
        found = re.search(r"([\d,]+) tokens, ([\d,]+) trained</span>", body)
        assert found
        return list(found.groups())

    assert figures(everything) == [figures(answers)[0]] * 2 != figures(answers)
    assert "answers and inputs" in everything and "assistant replies only" in answers


@pytest.mark.slow
def test_a_file_nobody_looked_through_yet_is_looked_through_by_a_task(organization, alice, client_for) -> None:
    version = make_ready_version(organization)

    body = client_for(alice).get(page_of(version)).content.decode()

    assert "checking the rows" in body and 'every 2s"' in body
    assert OutboxMessage.objects.filter(topic="dataset.inspect").count() == 1


def test_bad_rows_are_counted_alike_everywhere(organization, alice, client_for) -> None:
    """That the file has too few rows is no error of a row."""
    version = make_ready_version(organization, b'{"messages": []}\n' * 2 + jsonl(5))
    assert version.error_count == 3

    body = client_for(alice).get(page_of(version, find="errors")).content.decode()

    assert "2 with errors" in body and "With errors (2)" in body and "Remove 2 rows" in " ".join(body.split())
    assert re.findall(r'<span class="n">(\d+)</span>', body) == ["1", "2"]
