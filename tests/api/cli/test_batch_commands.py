"""`anneal batches`: the question before a batch, its way to the end, and its answers as files."""

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from anneal import watching
from rich.console import Console

from apps.batches import operations
from apps.batches.endings import finish
from apps.batches.lifecycle import BatchStatus, RequestStatus
from apps.batches.models import Batch, BatchFile, BatchRequest
from apps.batches.validation import validate
from apps.core.database.clock import db_now
from tests.factories.batches import make_batch, make_line


@pytest.fixture
def asks(tmp_path: Path) -> Path:
    path = tmp_path / "asks.jsonl"
    path.write_text("".join(f"{json.dumps(make_line(name))}\n\n" for name in "ab"))
    return path


def answer(seconds: float) -> None:
    """Answer one of two requests, as the worker of batches does."""
    batch = Batch.objects.get()
    validate(batch=batch, now=db_now())
    BatchRequest.objects.filter(custom_id="a").update(status=RequestStatus.COMPLETED, result='{"custom_id":"a"}')
    Batch.objects.update(status=BatchStatus.FINALIZING, completed=1)
    batch.refresh_from_db()
    finish(batch=batch, to=BatchStatus.COMPLETED, now=db_now())


def test_a_batch_starts_once_it_is_accepted_and_is_followed_to_its_files(
    anneal, organization, asks, tmp_path, network, monkeypatch
) -> None:
    drawn = StringIO()
    monkeypatch.setattr(watching, "console", lambda: Console(file=drawn, force_terminal=True, width=100))
    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=answer))
    (tmp_path / "out.jsonl.part").write_text("of another file")

    declined = anneal("batches", "create", str(asks), answer="n\n")
    calls = list(network.calls)
    done = anneal("batches", "create", str(asks), "--metadata", "team=core", "--wait", answer="y\n")
    batch = Batch.objects.get()
    saved = anneal("batches", "output", batch.pk, "--to", str(tmp_path / "out.jsonl"), "--json")

    assert (declined.exit_code, calls) == (1, []) and "Start 2 requests? [y/N]" in declined.errors
    assert done.exit_code == 0 and "1 of 2 answered, 1 failed" in done.output, done.errors
    assert "validating" in drawn.getvalue() and "2 of 2" in drawn.getvalue()
    assert (batch.metadata, batch.input_file.bytes) == ({"team": "core"}, asks.stat().st_size)
    assert saved.exit_code == 0, saved.errors
    assert [Path(file["path"]).name for file in saved.json["files"]] == ["out.jsonl", "out.errors.jsonl"]
    assert (tmp_path / "out.jsonl").read_text() == '{"custom_id":"a"}\n'
    assert json.loads((tmp_path / "out.errors.jsonl").read_text())["custom_id"] == "b"
    assert list(tmp_path.glob("*.part")) == []


def test_a_file_whose_batch_is_refused_is_named_and_used_again(anneal, organization, asks, monkeypatch) -> None:
    with monkeypatch.context() as limited:
        limited.setattr(operations, "MAX_ACTIVE", 0)
        refused = anneal("batches", "create", str(asks), "--yes")
    file = BatchFile.objects.get()
    again = anneal("batches", "create", file.pk, "--yes")

    assert refused.exit_code != 0 and "batches that have not ended" in refused.errors
    assert f"run the same command with {file.pk} in place of {asks}" in refused.errors
    assert again.exit_code == 0 and BatchFile.objects.count() == 1, again.errors


@pytest.mark.slow
def test_a_batch_is_listed_shown_and_cancelled_and_its_bad_lines_are_named(
    anneal, organization, alice, monkeypatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=interrupt))
    bad = make_batch(organization, alice, [make_line("a", method="GET")])
    validate(batch=bad, now=db_now())
    left = anneal("batches", "create", bad.input_file_id, "--yes", "--wait")
    batch = Batch.objects.exclude(pk=bad.pk).get()
    listed, shown = anneal("batches", "list", "--json"), anneal("batches", "show", bad.pk)
    early, cancelled = anneal("batches", "output", batch.pk), anneal("batches", "cancel", batch.pk)

    assert left.exit_code == 130 and f"anneal batches cancel {batch.pk}" in left.errors
    assert BatchFile.objects.count() == 1, "a file that is there already is not sent"
    assert {each["id"] for each in listed.json["data"]} == {bad.pk, batch.pk}
    assert batch.pk in anneal("batches", "list").output
    assert "Line 1: The method must be POST." in shown.output
    assert early.exit_code == 5 and "validating and has no answers" in early.errors
    assert cancelled.exit_code == 0 and "cancelling" in cancelled.output
    assert anneal("batches", "cancel", bad.pk).exit_code == 5
    unknown = anneal("batches", "create", "nothing.jsonl", "--yes")
    assert unknown.exit_code == 2 and "neither a file here nor the id" in unknown.errors
