"""The training file of the demo: banking77, uploaded once and checked by the platform."""

import csv
import json
from pathlib import Path

from openai.types import FileObject

from demo.main_job.answers import FileMembers
from demo.main_job.platform import DemoFailed, Platform, extra, found
from demo.main_job.stages import Stage, until
from demo.main_job.state import State

DATA = Path(__file__).resolve().parents[1] / "banking77"
CHECKS_FILES = "celery-data-small"  # the demo's files are at most a few megabytes


def upload(platform: Platform, state: State, stage: Stage, folder: Path) -> str:
    """Return the id of the training file; upload it first unless a valid one exists."""
    files = platform.openai.files
    kept = found(lambda: files.retrieve(state["file_id"])) if state["file_id"] else None
    if kept is not None and kept.status != "error":
        stage.line("upload", f"kept from before: {kept.id}")
        return str(_validated(platform, stage, kept.id).id)
    if state["file_id"]:
        stage.line("upload", f"The file {state['file_id']} is gone or not valid: uploading it again.")
    path = folder / "banking77-train.jsonl"
    with path.open("w") as lines:
        for text, label in read_rows("train.csv"):
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": label}]
            lines.write(json.dumps({"messages": messages}) + "\n")
    state["file_id"] = files.create(file=path, purpose="fine-tune").id
    checked = _validated(platform, stage, state["file_id"])
    rows = extra(checked, FileMembers).validation.rows
    stage.line("upload", f"{path.name}, {checked.bytes / 1e6:.1f} MB, {rows:,} rows valid: {checked.id}")
    return str(checked.id)


def _validated(platform: Platform, stage: Stage, file_id: str) -> FileObject:
    def fetch() -> FileObject | None:
        file = platform.openai.files.retrieve(file_id)
        return file if file.status in ("processed", "error") else None

    hint = f"The file is still being checked. The process {CHECKS_FILES} does that."
    checked = until(fetch, lambda: hint, platform, stage, "upload", process=CHECKS_FILES)
    if checked.status == "error":
        raise DemoFailed(f"The training file is not valid: {checked.status_details}", process=CHECKS_FILES)
    return checked


def read_rows(name: str) -> list[tuple[str, str]]:
    """Return the (message, label) pairs of a file of the data set."""
    with (DATA / name).open(newline="") as file:
        return [(row["text"], row["category"]) for row in csv.DictReader(file)]
