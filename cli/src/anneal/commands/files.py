"""`anneal files`: check a file here, upload it, and list, download and delete files."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from anneal.api import Api, item_path
from anneal.commands.requests import metadata_of, present
from anneal.failures import ExitCode, Failure
from anneal.migration.rows import conversion_text, convert_file
from anneal.output import (
    AsJson,
    Limit,
    SureToDelete,
    confirm_deletion,
    counted,
    emit,
    emit_list,
    fields,
    moment,
    notice,
    size,
)
from anneal.session import Session, session_of
from anneal.texts import is_file
from anneal.transfers import download, upload_whole
from anneal.transfers import upload as send
from apps.core.errors import DomainError
from apps.datasets.problems import LineError
from apps.datasets.validation.containers import Container
from apps.datasets.validation.formats import Mapping, read_mapping
from apps.datasets.validation.validator import ValidationReport, validate_file

app = typer.Typer(no_args_is_help=True, help="Check, upload, list, download and delete files.")
_FILES = "/v1/files"
_SHOWN_ERRORS = 20
_BLOCK_BYTES = 256 * 1024
_POLL_SECONDS = 1.0

FileId = Annotated[str, typer.Argument(metavar="FILE", help="The id of a file, file-….")]
Wait = Annotated[bool, typer.Option(help="Wait until the server has checked the file.")]
LocalFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="The file.")]
GivenMapping = Annotated[
    str | None,
    typer.Option(
        "--mapping",
        help='The columns, as JSON: {"format": "prompt_completion", "columns": {"prompt": "q", "completion": "a"}}',
    ),
]


@app.command()
def check(context: typer.Context, path: LocalFile, mapping: GivenMapping = None, as_json: AsJson = False) -> None:
    """Check a training file on this machine, by the same rules and with the same messages as the server.

    The server also checks that each row fits the base model's chat template. Exits with 1 if there are problems.
    """
    report = check_file(path, read_given(mapping))
    emit(context, _check_object(path, report), lambda: _text_of(path, report))
    if not report.is_valid:
        raise typer.Exit(ExitCode.NEGATIVE)


@app.command()
def convert(
    context: typer.Context,
    path: LocalFile,
    to: Annotated[Path | None, typer.Option(help="The new file. By default, NAME.converted.jsonl beside it.")] = None,
    answer_key: Annotated[str | None, typer.Option(help="The key of the ideal answer in reinforcement rows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Convert old OpenAI rows: functions become tools, and reinforcement rows with an ideal answer become supervised.

    Lines that cannot be converted are left out, and listed with the reason. Exits with 1 if there are any.
    """
    target = to or path.with_name(f"{path.name.removesuffix('.jsonl')}.converted.jsonl")
    if target.exists() and target.samefile(path):
        raise typer.BadParameter("The new file must be another one.", param_hint="--to")
    done = convert_file(path, target, answer_key=answer_key)
    problems = [{"line": line, "message": reason} for line, reason in done.problems]
    lines = [f"Line {each['line']} is left out: {each['message']}" for each in problems[:_SHOWN_ERRORS]]
    emit(
        context,
        {"object": "file.conversion", "path": str(target), "rows": done.rows, "functions": done.functions,
         "answers": done.answers, "problems": problems},
        lambda: "\n".join([f"{target}: {conversion_text(done)}", *lines]),
    )  # fmt: skip
    if problems:
        raise typer.Exit(ExitCode.NEGATIVE)


@app.command()
def upload(
    context: typer.Context,
    path: LocalFile,
    purpose: Annotated[str, typer.Option(help="fine-tune, evals or batch.")] = "fine-tune",
    mapping: GivenMapping = None,
    check_first: Annotated[bool, typer.Option("--check/--no-check", help="Check a training file here first.")] = True,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Upload a file in parts, within an hour.

    After an interruption, run the same command again: it continues until an hour after its first start.
    """
    session, given = session_of(context), read_given(mapping)
    if check_first and purpose == "fine-tune":  # others may hold requests or items in place of rows
        report = check_file(path, given)
        if not report.is_valid:
            emit(context, _check_object(path, report), lambda: _text_of(path, report))
            notice("Nothing was uploaded.")
            raise typer.Exit(ExitCode.NEGATIVE)
    try:
        file = send(session, path, purpose=purpose, mapping=msgspec.to_builtins(given))
    except KeyboardInterrupt:
        notice("The upload stopped. Run the same command again within an hour of its first start to continue.")
        raise
    _emit_checked(context, wait_for_file(session, file) if wait else file)


def _emit_checked(context: typer.Context, file: dict[str, Any]) -> None:
    emit(context, file, lambda: file_text(file))
    if file["status"] == "error":
        raise typer.Exit(ExitCode.NEGATIVE)


@app.command("list")
def list_files(
    context: typer.Context,
    limit: Limit = 20,
    purpose: Annotated[
        str | None, typer.Option(help="fine-tune, fine-tune-results, evals, batch or batch_output.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List files, newest first."""
    head = ("ID", "NAME", "PURPOSE", "STATUS", "ROWS", "SIZE", "CREATED")
    emit_list(context, session_of(context).api.pages(_FILES, limit=limit, purpose=purpose), head, _cells)


def _cells(file: dict[str, Any]) -> tuple[object, ...]:
    return (
        file["id"], file["filename"], file["purpose"], file["status"],
        file.get("validation", {}).get("rows"), size(file["bytes"]), moment(file["created_at"]),
    )  # fmt: skip


@app.command()
def show(context: typer.Context, file: FileId, as_json: AsJson = False) -> None:
    """Show a file. If the server refused it, show its first problems."""
    found = session_of(context).api.get(item_path(_FILES, file))
    emit(context, found, lambda: file_text(found))


@app.command()
def pull(
    context: typer.Context,
    file: FileId,
    to: Annotated[Path | None, typer.Option(help="The new file. By default, FILE with the ending of its name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Download a file: rows, the metrics of a job, or the answers of a batch."""
    saved = save(session_of(context).api, file, to)
    emit(context, {"object": "file.pull"} | saved, f"{saved['path']}: {size(saved['bytes'])}")


@app.command()
def delete(context: typer.Context, file: FileId, yes: SureToDelete = False, as_json: AsJson = False) -> None:
    """Delete a file. It asks first. Jobs that used the file keep their results."""
    confirm_deletion(file, is_accepted=yes)
    found = session_of(context).api.delete(item_path(_FILES, file))
    emit(context, found, f"{found['id']} is deleted.")


@app.command("from-completions")
def from_completions(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The dataset. If it exists, it gets its next version.")],
    model: Annotated[str | None, typer.Option(help="Only completions of this model.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="Only completions with this label: topic=billing; may be given again.")
    ] = None,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Make a training file of the newest stored completions, up to 10,000. Each becomes a row."""
    session = session_of(context)
    chosen = present(model=model, metadata=metadata_of({}, metadata))
    file = session.api.post_once("/api/v1/datasets", {"name": name, "stored_completions": chosen})
    _emit_checked(context, wait_for_file(session, file) if wait else file)


def check_file(path: Path, mapping: Mapping | None = None) -> ValidationReport:
    report = validate_file(_blocks(path), filename=path.name, mapping=mapping)
    if report.container == Container.PARQUET and find_spec("pyarrow") is None:
        text = "Parquet is read by pyarrow, which is not installed. Install anneal[parquet], or upload with --no-check."
        raise Failure(text, ExitCode.USAGE)
    return report


def read_given(mapping: str | None) -> Mapping | None:
    try:
        return read_mapping(mapping)
    except DomainError as error:
        raise Failure(error.message, ExitCode.USAGE, details=dict(error.as_openai()["error"])) from error


def wait_for_file(session: Session, file: dict[str, Any]) -> dict[str, Any]:
    """Return the file once the server has checked it."""
    while file["status"] == "uploaded":
        time.sleep(_POLL_SECONDS)
        file = session.api.get(item_path(_FILES, file["id"]))
    return file


def accepted_id(session: Session, path: Path, file: dict[str, Any]) -> str:
    """Return the id of a file that was sent, once the server has checked it. Raises Failure with its first problem."""
    file = wait_for_file(session, file)
    if file["status"] == "error":
        raise Failure(f"{path}: {file['status_details']}", ExitCode.NEGATIVE)
    return str(file["id"])


def find_path(given: str, option: str) -> Path | None:
    """Return the path of a file on this machine, or None for the id of an uploaded one. Raises BadParameter."""
    if is_file(given):
        return Path(given)
    if given.startswith("file-"):
        return None
    raise typer.BadParameter(f"{given} is neither a file here nor the id of an uploaded one.", param_hint=option)


@contextmanager
def uploaded(session: Session, given: str, *, purpose: str, option: str) -> Iterator[str]:
    """Give the id of an uploaded file. A file on this machine is uploaded first. Raises BadParameter, Failure.

    If the work with it fails, the file stays, and a notice shows how to use it again.
    """
    path = find_path(given, option)
    if path is None:
        yield given
        return
    found = accepted_id(session, path, upload_whole(session, path, purpose=purpose))
    notice(f"{path} is uploaded as {found}.")
    try:
        yield found
    except Failure:
        notice(f"{found} is kept. To use it, run the same command with {found} in place of {path}.")
        raise


def save(api: Api, file_id: str, to: Path | None) -> dict[str, Any]:
    """Download a file, and return its id, path and size. Without `to`, its path is its id with its ending."""
    place = item_path(_FILES, file_id)
    found = api.get(place)
    path = to or Path(quote(f"{file_id}{PurePosixPath(found['filename']).suffix}", safe=""))
    download(api, f"{place}/content", path, size=found["bytes"], sha256=found.get("sha256"))
    return {"id": file_id, "path": str(path), "bytes": found["bytes"]}


def file_text(file: dict[str, Any]) -> str:
    """Return what a person wants to know of an uploaded file, with its first problems."""
    validation = file.get("validation") or {}
    counts = (validation.get("tokens") or {}).items()
    facts = fields(
        [
            ("File", file["id"]),
            ("Name", file["filename"]),
            ("Status", file["status"]),
            ("Rows", validation.get("rows")),
            *((f"Tokens, {model}", _count_text(count)) for model, count in counts),
        ]
    )
    problems = [msgspec.convert(each, LineError) for each in validation.get("errors", ())]
    return "\n".join([facts, *_problem_lines(problems, validation.get("error_count", 0))])


def _count_text(count: dict[str, Any]) -> str:
    """Return the number of tokens, or the row that the base model's chat template refused."""
    if refusal := count.get("refusal"):
        return _problem_line(msgspec.convert(refusal, LineError))
    return f"{count['tokens']:,}"


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(_BLOCK_BYTES), b"")


def _check_object(path: Path, report: ValidationReport) -> dict[str, Any]:
    return {
        "object": "file.check",
        "path": str(path),
        "sha256": report.sha256,
        "kind": report.kind or None,
        "format": report.mapping.format if report.mapping else None,
        "container": report.container or None,
        "validation": {
            "rows": report.rows,
            "error_count": report.error_count,
            "errors": [msgspec.to_builtins(each) for each in report.errors],
        },
    }


def _text_of(path: Path, report: ValidationReport) -> str:
    count = counted(report.rows, "row")
    if report.is_valid:
        return f"{path}: {count}, {report.kind}, read as {report.container}. No problems."
    lines = _problem_lines(report.errors, report.error_count)
    return "\n".join([f"{path}: {count}.", *lines])


def _problem_lines(problems: "tuple[LineError, ...] | list[LineError]", count: int) -> list[str]:
    lines = [_problem_line(each) for each in problems[:_SHOWN_ERRORS]]
    more = count - len(lines)
    return lines + ([f"{more:,} more. Print all with --json."] if more > 0 else [])


def _problem_line(problem: LineError) -> str:
    return f"Line {problem.line}: {problem.message} {problem.fix} [{problem.code}]"
