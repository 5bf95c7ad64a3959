"""`anneal jobs`: create, follow and steer fine-tuning jobs."""

from decimal import Decimal
from typing import Annotated, Any

import typer

from anneal.api import JOBS, item_path, job_path
from anneal.commands.estimates import Nodes, machines_text, options_table
from anneal.commands.requests import Body, JobOptions, Metadata, amount_of, budget_of, read_body
from anneal.comparison import comparison, comparison_table
from anneal.failures import ExitCode, Failure
from anneal.output import (
    AsJson,
    Limit,
    Yes,
    confirm_price,
    console,
    dollars,
    emit,
    emit_line,
    emit_list,
    moment,
    notice,
    plain,
)
from anneal.session import Session, session_of
from anneal.watching import FAILED, event_line, exit_code_of, follow, job_text, new_events
from anneal.watching import watch as watch_job

app = typer.Typer(no_args_is_help=True, help="Create, follow and steer fine-tuning jobs.")
_CHECKPOINTS, _MOST_CHECKPOINTS = "/api/v1/checkpoints", 10_000

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The id of a job, ftjob-….")]
MaxCost = Annotated[str | None, typer.Option(help="The maximum cost of the job, in dollars.")]


@app.command()
def create(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="The base model, or a fine-tuned one to continue; else the project's.")
    ] = None,
    file: Annotated[str | None, typer.Option(help="The id of the training file.")] = None,
    validation_file: Annotated[str | None, typer.Option(help="The id of the validation file.")] = None,
    method: Annotated[str | None, typer.Option(help="supervised, dpo, orpo or text.")] = None,
    suffix: Annotated[str | None, typer.Option(help="A part of the model's name.")] = None,
    epochs: Annotated[str | None, typer.Option(help="A number, or auto.")] = None,
    batch_size: Annotated[str | None, typer.Option(help="A number, or auto.")] = None,
    rank: Annotated[int | None, typer.Option(help="The LoRA rank: 8, 16, 32 or 64.")] = None,
    quantization: Annotated[str | None, typer.Option(help="nf4 for QLoRA.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the recipe: epochs=2; may be given again.")
    ] = None,
    metadata: Metadata = None,
    export: Annotated[list[str] | None, typer.Option(help="merged_16bit or gguf; may be given again.")] = None,
    pool: Annotated[str | None, typer.Option(help="An option of the estimate, such as h200:4.")] = None,
    nodes: Nodes = None,
    max_cost: MaxCost = None,
    seed: Annotated[int | None, typer.Option(help="The seed.")] = None,
    body: Body = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the price and whether it would start.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Create a job. It shows the most that the job can cost, and asks before it starts."""
    session = session_of(context)
    options = JobOptions(
        model=model, file=file, validation_file=validation_file, method=method, suffix=suffix, epochs=epochs,
        batch_size=batch_size, rank=rank, quantization=quantization, settings=set_ or [], metadata=metadata or [],
        exports=export or [], pool=pool, nodes=nodes, max_cost=max_cost, seed=seed,
    )  # fmt: skip
    request = options.request(read_body(body))
    dry_run = request.pop("dry_run", None) is True or dry_run
    rehearsal = session.api.post(JOBS, request | {"dry_run": True})
    if dry_run:
        emit(context, rehearsal, lambda: options_table(rehearsal["pools"]))
        if not as_json:
            console().print(plain(_would(rehearsal)))
        if not rehearsal["would_start"]:
            raise typer.Exit(ExitCode.REFUSED)
        return
    if refusal := rehearsal["refusal"]:
        raise Failure(refusal["message"], ExitCode.REFUSED, details=refusal)
    if remarks := _remarks(rehearsal):
        notice(remarks)
    confirm_price(rehearsal["hold_usd"], "Start?", is_accepted=yes)
    request["budget"] = budget_of(request, shown_usd=rehearsal["hold_usd"])
    job = session.api.post_once(JOBS, request)
    if not watch:
        emit(context, job, lambda: f"{job_text(job)}\nFollow it with `anneal jobs watch {job['id']}`.")
        return
    notice(f"Created {job['id']}.")
    _watch(context, session, job["id"])


@app.command("list")
def list_jobs(context: typer.Context, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List jobs, newest first."""
    head = ("ID", "STATUS", "BASE MODEL", "STEP", "COST", "CREATED", "MODEL")
    session = session_of(context)
    emit_list(context, session.api.pages(JOBS, limit=limit, project=session.project), head, _cells)


def _cells(job: dict[str, Any]) -> tuple[object, ...]:
    return (
        job["id"], job["status"], job["base_model"], f"{job['step']}/{job['total_steps'] or '-'}",
        dollars(job["cost_usd"]), moment(job["created_at"]), job["fine_tuned_model"],
    )  # fmt: skip


@app.command()
def show(context: typer.Context, job: JobId, as_json: AsJson = False) -> None:
    """Show one job. If it failed, show the cause and the suggested change."""
    found = session_of(context).api.get(job_path(job))
    emit(context, found, lambda: job_text(found))


@app.command()
def watch(context: typer.Context, job: JobId, as_json: AsJson = False) -> None:
    """Follow a job with its loss until it ends. Ctrl-C leaves it running. Exits with 1 unless it succeeds.

    With --json, each event is one line, and the last line is the job.
    """
    _watch(context, session_of(context), job)


def _watch(context: typer.Context, session: Session, job_id: str) -> None:
    as_json = session.as_json
    job = watch_job(session.api, job_id, on_event=_printer(is_json=as_json), is_drawn=not as_json)
    if as_json:
        emit_line(job)
    else:
        console().print(plain(job_text(job)))
    raise typer.Exit(exit_code_of(job))


@app.command()
def logs(
    context: typer.Context,
    job: JobId,
    is_followed: Annotated[bool, typer.Option("--follow", "-f", help="Print new events until the job ends.")] = False,
    tail: Annotated[int, typer.Option(min=1, max=100_000, help="How many of the latest events.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Print the events of a job, oldest first; with --json, one on each line."""
    api, show_event = session_of(context).api, _printer(is_json=as_json)
    if not is_followed:
        for event in new_events(api, job, last_id=None, limit=tail):
            show_event(event)
        return
    try:
        for _, events in follow(api, job, tail=tail):
            for event in events:
                show_event(event)
    except KeyboardInterrupt:
        notice(f"{job} keeps running.")
        raise


def _printer(*, is_json: bool) -> Any:
    return emit_line if is_json else lambda event: console().print(event_line(event))


@app.command()
def pause(context: typer.Context, job: JobId, as_json: AsJson = False) -> None:
    """Pause a running job at a checkpoint. You pay for the training so far."""
    _act(context, job, "pause")


@app.command()
def cancel(context: typer.Context, job: JobId, as_json: AsJson = False) -> None:
    """Cancel a job. You pay for the training that is kept."""
    _act(context, job, "cancel")


@app.command()
def resume(
    context: typer.Context, job: JobId, max_cost: MaxCost = None, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Continue a paused job from its checkpoint, optionally with a new spend cap."""
    found = session_of(context).api.get(job_path(job))
    budget = {} if max_cost is None else {"max_cost_usd": str(amount_of(max_cost))}
    cap = budget.get("max_cost_usd", found["spend_cap_usd"])
    left = None if cap is None else str(max(Decimal(0), amount_of(cap) - Decimal(found["cost_usd"] or 0)))
    confirm_price(left, "Resume?", is_accepted=yes)
    _act(context, job, "resume", budget or None)


@app.command()
def retry(
    context: typer.Context, job: JobId, max_cost: MaxCost = None, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Start a failed job again with the change that Anneal suggests."""
    found = session_of(context).api.get(job_path(job))
    advice = (found["error"] or {}).get("suggestion") or {}
    if found["status"] != FAILED:
        raise Failure(f"{job} is {found['status']}: only a failed job can be retried.", ExitCode.REFUSED)
    notice(advice.get("text", ""))
    budget = {} if max_cost is None else {"max_cost_usd": str(amount_of(max_cost))}
    shown_usd = budget.get("max_cost_usd", advice.get("hold_usd"))
    confirm_price(shown_usd, "Start?", is_accepted=yes)
    _act(context, job, "retry", budget_of({"budget": budget}, shown_usd=shown_usd), prefix="/api")


@app.command()
def move(
    context: typer.Context,
    job: JobId,
    to: Annotated[str | None, typer.Option("--to", help="The option to move to, such as h200:4.")] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """List the pools where a queued job would start sooner, or move it to one with --to."""
    api, place = session_of(context).api, f"/api{job_path(job)}/moves"
    moves = api.get(place)["data"]
    if to is None:
        emit_list(
            context, moves, ("OPTION", "GPU", "MACHINES", "STARTS IN", "SOONER BY", "COST", "AT MOST"), _move_cells
        )
        return
    chosen = next((each for each in moves if each["option"] == to), None)
    if chosen is None:
        text = f"{job} would not start sooner on {to}. Run `anneal jobs move {job}` to list where it would."
        raise Failure(text, ExitCode.REFUSED)
    confirm_price(chosen["maximum_usd"], f"Move to {to}?", is_accepted=yes)
    asked = {"option": to, "node_count": chosen["node_count"], "quoted_max_usd": chosen["maximum_usd"]}
    moved = api.post_once(place, asked)
    emit(context, moved, lambda: job_text(moved))


def _move_cells(move: dict[str, Any]) -> tuple[object, ...]:
    sooner = move["sooner_seconds"]
    return (
        move["option"], f"{move['gpu_count']} × {move['gpu_type']}", str(move["node_count"]),
        f"{move['starts_after_seconds']} s",
        None if sooner is None else f"{sooner} s", dollars(move["cost_usd"]),
        dollars(move["maximum_usd"], is_limit=True),
    )  # fmt: skip


def _act(
    context: typer.Context, job_id: str, action: str, budget: dict[str, str] | None = None, *, prefix: str = ""
) -> None:
    body = {"budget": budget} if budget else None
    job = session_of(context).api.post_once(f"{prefix}{job_path(job_id)}/{action}", body)
    emit(context, job, lambda: job_text(job))


@app.command()
def checkpoints(
    context: typer.Context,
    job: JobId,
    serve: Annotated[
        int | None, typer.Option(metavar="STEP", help="Deploy the checkpoint of this step under its model's name.")
    ] = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a job, the last first, or deploy one with --serve."""
    api, place = session_of(context).api, f"{job_path(job)}/checkpoints"
    if serve is None:
        head = ("STEP", "LOSS", "VALIDATION LOSS", "CREATED", "MODEL")
        emit_list(context, api.pages(place, limit=limit), head, _checkpoint_cells)
        return
    chosen = next((each for each in api.pages(place, limit=_MOST_CHECKPOINTS) if each["step_number"] == serve), None)
    if chosen is None:
        raise Failure(f"{job} has no checkpoint of step {serve}.", ExitCode.NOT_FOUND)
    found = api.post_once(f"{item_path(_CHECKPOINTS, chosen['id'])}/serve")
    emit(context, found, f"{found['model']} is {found['state']}. {found['reason'] or ''}".strip())


def _checkpoint_cells(checkpoint: dict[str, Any]) -> tuple[object, ...]:
    step, metrics = checkpoint["step_number"], checkpoint["metrics"]
    losses = (f"{metrics[name]:.4f}" if name in metrics else None for name in ("train_loss", "valid_loss"))
    return step, *losses, moment(checkpoint["created_at"]), checkpoint["fine_tuned_model_checkpoint"]


@app.command()
def compare(
    context: typer.Context,
    jobs: Annotated[list[str], typer.Argument(metavar="JOB JOB...", help="The ids of two or more jobs.")],
    as_json: AsJson = False,
) -> None:
    """Compare jobs: the settings in which they differ, their losses, results and costs."""
    if len(set(jobs)) < 2:
        raise typer.BadParameter("Name at least two jobs.", param_hint="JOB")
    found = comparison(session_of(context).api, list(dict.fromkeys(jobs)))
    emit(context, found, lambda: comparison_table(found))


def _would(rehearsal: dict[str, Any]) -> str:
    if refusal := rehearsal["refusal"]:
        return f"It would not start: {refusal['message']}"
    hold = dollars(rehearsal["hold_usd"], is_limit=True)
    start = f"It would start on {rehearsal['pool']} and cost at most {hold}."
    return f"{start} {_remarks(rehearsal)}".strip()


def _remarks(rehearsal: dict[str, Any]) -> str:
    """Return sentences on what the request left open and the job would get."""
    chosen = ", ".join(rehearsal["from_project"])
    place = rehearsal["pool"], rehearsal["gpu_count"]
    pool = next((each for each in rehearsal["pools"] if (each["pool"], each["gpu_count"]) == place), None)
    machines = machines_text(pool) if pool else ""  # "" for one machine
    remarks = [f"Chosen by the project: {chosen}."] if chosen else []
    remarks += [f"It uses {rehearsal['gpu_count']} GPUs {machines}."] if machines else []
    return " ".join(remarks)
