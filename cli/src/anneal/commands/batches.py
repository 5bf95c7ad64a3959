"""`anneal batches`: many requests in one file, answered within a day."""

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from anneal.api import item_path
from anneal.commands.files import find_path, save, uploaded
from anneal.commands.requests import Metadata, metadata_of, present
from anneal.failures import ExitCode, Failure
from anneal.output import AsJson, Limit, Yes, confirm_price, counted, emit, emit_list, fields, moment, notice, size
from anneal.session import session_of
from anneal.watching import COMPLETED, FAILED, watch_counts

app = typer.Typer(no_args_is_help=True, help="Send a file of requests, and get the answers within a day.")
_BATCHES = "/v1/batches"
_ENDED = frozenset({COMPLETED, FAILED, "expired", "cancelled"})

BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="The id of a batch, batch_….")]


@app.command()
def create(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A JSONL file, or the id of an uploaded one.")],
    endpoint: Annotated[
        str, typer.Option(help="The url in each request: this or /v1/completions.")
    ] = "/v1/chat/completions",
    metadata: Metadata = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the batch until it ends.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Upload a file of requests and get answers at the price of batches. It asks before it starts.

    With --wait, it exits with 1 unless the batch completes. Ctrl-C leaves the batch running.
    """
    session, path = session_of(context), find_path(file, "FILE")
    body = {"endpoint": endpoint, "completion_window": "24h"} | present(metadata=metadata_of({}, metadata))
    confirm_price(None, f"Start {_requests(path, file)}?", is_accepted=yes)
    with uploaded(session, file, purpose="batch", option="FILE") as file_id:
        batch = session.api.post_once(_BATCHES, body | {"input_file_id": file_id})
    if wait:
        batch_id = batch["id"]
        notice(f"Created {batch_id}.")
        batch = watch_counts(
            session.api,
            item_path(_BATCHES, batch_id),
            settled=_ENDED,
            counts=_counts,
            is_drawn=not session.as_json,
            farewell=f"{batch_id} goes on. Look at it with `anneal batches show {batch_id}`, "
            f"or stop it with `anneal batches cancel {batch_id}`.",
        )
    emit(context, batch, lambda: _text(batch))
    if wait and batch["status"] != COMPLETED:
        raise typer.Exit(ExitCode.NEGATIVE)


def _requests(path: Path | None, given: str) -> str:
    if path is None:
        return f"the requests of {given}"
    with path.open("rb") as lines:
        count = sum(1 for line in lines if line.strip())
    if not count:
        raise typer.BadParameter(f"{given} has no requests.", param_hint="FILE")
    return counted(count, "request")


def _counts(batch: dict[str, Any]) -> tuple[int, int]:
    counts = batch["request_counts"]
    return counts["completed"] + counts["failed"], counts["total"]


@app.command("list")
def list_batches(context: typer.Context, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List batches, newest first."""
    head = ("ID", "STATUS", "MODEL", "REQUESTS", "ANSWERED", "FAILED", "CREATED")
    emit_list(context, session_of(context).api.pages(_BATCHES, limit=limit), head, _cells)


def _cells(batch: dict[str, Any]) -> tuple[object, ...]:
    counts = batch["request_counts"]
    return (
        batch["id"], batch["status"], batch["model"], counts["total"], counts["completed"], counts["failed"],
        moment(batch["created_at"]),
    )  # fmt: skip


@app.command()
def show(context: typer.Context, batch: BatchId, as_json: AsJson = False) -> None:
    """Show one batch. If it failed, show the lines that are wrong."""
    found = session_of(context).api.get(item_path(_BATCHES, batch))
    emit(context, found, lambda: _text(found))


@app.command()
def cancel(context: typer.Context, batch: BatchId, as_json: AsJson = False) -> None:
    """Cancel a batch. You pay for the answers so far, and can download them."""
    found = session_of(context).api.post(f"{item_path(_BATCHES, batch)}/cancel")
    emit(context, found, lambda: _text(found))


@app.command()
def output(
    context: typer.Context,
    batch: BatchId,
    to: Annotated[Path | None, typer.Option(help="The file of the answers. By default, BATCH.jsonl.")] = None,
    as_json: AsJson = False,
) -> None:
    """Download the answers of a batch that has ended, and beside them those of failed requests, NAME.errors.jsonl."""
    api = session_of(context).api
    found = api.get(item_path(_BATCHES, batch))
    target = to or Path(f"{quote(batch, safe='')}.jsonl")
    beside = target.with_name(f"{target.name.removesuffix('.jsonl')}.errors.jsonl")
    wanted = {"output_file_id": target, "error_file_id": beside}
    files = [save(api, found[member], path) for member, path in wanted.items() if found[member]]
    if not files:
        text = f"{batch} is {found['status']} and has no answers. Look at it with `anneal batches show {batch}`."
        raise Failure(text, ExitCode.REFUSED)
    emit(
        context,
        {"object": "batch.output", "batch": batch, "files": files},
        "\n".join(f"{file['path']}: {size(file['bytes'])}" for file in files),
    )


def _text(batch: dict[str, Any]) -> str:
    """Return what a person wants to know of a batch, with the first lines that are wrong."""
    counts, usage = batch["request_counts"], batch["usage"]
    answered = f"{counts['completed']:,} of {counts['total']:,} answered, {counts['failed']:,} failed"
    tokens = f"{usage['input_tokens']:,} in, {usage['output_tokens']:,} out"
    facts = fields(
        [
            ("Batch", batch["id"]),
            ("Status", batch["status"]),
            ("Model", batch["model"]),
            ("Requests", answered if counts["total"] else None),
            ("Tokens", tokens if usage["total_tokens"] else None),
            ("Input file", batch["input_file_id"]),
            ("Answers", batch["output_file_id"]),
            ("Errors", batch["error_file_id"]),
            ("Created", moment(batch["created_at"])),
            ("Expires", None if batch["status"] in _ENDED else moment(batch["expires_at"])),
        ]
    )
    lines = [facts]
    for error in (batch["errors"] or {}).get("data", ()):
        place = "" if error["line"] is None else f"Line {error['line']}: "
        lines.append(f"{place}{error['message']} [{error['code']}]")
    return "\n".join(lines)
