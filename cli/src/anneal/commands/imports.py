"""`anneal import`: files, jobs and model names from other services."""

import math
import time
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table

from anneal.api import PATIENT_ATTEMPTS, Api
from anneal.commands.models import base_models
from anneal.commands.requests import pairs_of, settings_of
from anneal.failures import ExitCode, Failure
from anneal.migration.config_keys import NAMES
from anneal.migration.configs import plan_of_config
from anneal.migration.importing import (
    Memory,
    convert_and_check,
    fetch_files,
    find_job,
    name_models,
    quote,
    send_files,
    standing,
    start,
)
from anneal.migration.openai_jobs import Export, OpenAi, Source, distinct, plan_of
from anneal.migration.plans import Plan
from anneal.output import (
    AsJson,
    Yes,
    ask_secret,
    confirm,
    confirm_price,
    console,
    counted,
    dollars,
    emit,
    notice,
    plain,
    table,
)
from anneal.session import Session, clean_url, session_of
from anneal.watching import FAILED, SETTLED

app = typer.Typer(no_args_is_help=True, help="Move files, jobs and model names from other services.")
_SECONDS = 2.0
_LONGEST_LOAD_SECONDS = 600  # once all jobs have ended

Folder = Annotated[Path, typer.Option(file_okay=False, help="The folder for downloads and state.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be imported. Nothing is uploaded.")]
Chosen = Annotated[list[str] | None, typer.Option("--map", help="The base model to use: gpt-4o-mini=qwen3-8b.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="A setting of each recipe: learning_rate=0.0001.")]
_HERE = Path("anneal-import")


@app.command()
def openai(
    context: typer.Context,
    export: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="A folder with jobs.json and the files, in place of a key."),
    ] = None,
    openai_url: Annotated[str, typer.Option(help="The address of OpenAI's API.")] = "https://api.openai.com/v1",
    openai_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", hidden=True)] = None,
    job: Annotated[list[str] | None, typer.Option(help="Only this job of OpenAI; may be given again.")] = None,
    map_: Chosen = None,
    set_: Settings = None,
    folder: Folder = _HERE,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Import fine-tuning jobs of OpenAI: their files, their recipes, and a price for each.

    The key is read from OPENAI_API_KEY or from a prompt. It is sent to OpenAI only and never stored. Run the same
    command again after an interruption: nothing is sent twice. Then `anneal import finish` gives the old names to
    the new models.
    """
    session = session_of(context)
    if httpx.URL(clean_url(openai_url)).netloc == httpx.URL(session.base_url).netloc and not export:
        text = f"{openai_url} is this installation, which must not get the key of OpenAI."
        raise typer.BadParameter(text, param_hint="--openai-url")
    source: Source = Export(export) if export else OpenAi(_openai(context, openai_url, openai_key))
    catalogue = base_models(session.api)
    chosen = pairs_of(map_ or [], "--map")
    found = [each for each in distinct(source.jobs()) if not job or each.get("id") in job]
    if missing := set(job or ()) - {each.get("id") for each in found}:
        text = f"{', '.join(sorted(missing))}: there is no such job in {export or 'your OpenAI project'}."
        raise typer.BadParameter(text, param_hint="--job")
    plans = [plan_of(each, catalogue=catalogue, chosen=chosen) for each in found]
    run_import(context, session, plans, source=source, folder=folder, settings=set_ or [], dry_run=dry_run, yes=yes)


def _import_config(tool: str) -> None:
    title = {"together": "Together", "fireworks": "Fireworks", "axolotl": "Axolotl"}.get(tool, "LLaMA-Factory")

    @app.command(tool, help=f"Make a job from a configuration of {title}, with a line for each of its keys.")
    def run(
        context: typer.Context,
        config: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A YAML or JSON file.")],
        data: Annotated[
            Path | None,
            typer.Option(exists=True, dir_okay=False, help="The training file, in place of the one that CONFIG names."),
        ] = None,
        validation_data: Annotated[
            Path | None,
            typer.Option(exists=True, dir_okay=False, help="The validation file, in place of the one in CONFIG."),
        ] = None,
        map_: Chosen = None,
        set_: Settings = None,
        folder: Folder = _HERE,
        dry_run: DryRun = False,
        yes: Yes = False,
        as_json: AsJson = False,
    ) -> None:
        session = session_of(context)
        chosen, names = pairs_of(map_ or [], "--map"), base_models(session.api)
        plan = plan_of_config(tool, config, data=data, validation_data=validation_data, catalogue=names, chosen=chosen)
        run_import(context, session, [plan], source=None, folder=folder, settings=set_ or [], dry_run=dry_run, yes=yes)


for _tool in NAMES:
    _import_config(_tool)


@app.command()
def status(context: typer.Context, folder: Folder = _HERE, as_json: AsJson = False) -> None:
    """Show where each imported job stands, and which old names answer."""
    session = session_of(context)
    found = standing(session.api, _begun(folder, session))
    emit(context, {"object": "import", "data": found}, lambda: _standing_table(found))


@app.command()
def finish(
    context: typer.Context,
    folder: Folder = _HERE,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the jobs and for their models.")] = False,
    as_json: AsJson = False,
) -> None:
    """Point the old model names at the new models of jobs that succeeded, so that requests for them answer.

    A name that is already an alias does not change. Exits with 1 unless all jobs succeeded and all names answer.
    """
    session = session_of(context)
    memory = _begun(folder, session)
    session.api.attempts = PATIENT_ATTEMPTS if wait else session.api.attempts
    found = name_models(session.api, memory)
    deadline = math.inf
    while wait and any(map(_is_pending, found)) and time.monotonic() < deadline:
        time.sleep(_SECONDS * len(found))
        if deadline == math.inf and all(each["status"] in (*SETTLED, "deleted") for each in found):
            deadline = time.monotonic() + _LONGEST_LOAD_SECONDS
        found = name_models(session.api, memory)
    emit(context, {"object": "import", "data": found}, lambda: _standing_table(found))
    for each in found:
        if each["note"]:
            notice(f"{each['alias']}: {each['note']}")
    if not all(each["status"] == "succeeded" and (each["alias_of"] or not each["alias"]) for each in found):
        raise typer.Exit(ExitCode.NEGATIVE)


def _begun(folder: Path, session: Session) -> Memory:
    """Return the memory of an import that started jobs. Raises Failure if the folder has none."""
    memory = Memory.open(folder, session.base_url)
    if not memory.jobs:
        text = f"{folder} has no jobs of an import. Import jobs first, or give the --folder of that import."
        raise Failure(text, ExitCode.USAGE)
    return memory


def _is_pending(state: dict[str, Any]) -> bool:
    """Return whether waiting may help: the job goes on, or no replica has loaded its model yet."""
    return state["status"] not in (*SETTLED, "deleted") or state["is_loading"]


def _standing_table(found: list[dict[str, Any]]) -> Table:
    head = ("IMPORTED FROM", "JOB", "STATUS", "OLD NAME", "ANSWERED BY")
    rows = ((each["imported_from"], each["job"], each["status"], each["alias"], each["alias_of"]) for each in found)
    return table(head, rows)


def _openai(context: typer.Context, url: str, given: str | None) -> Api:
    key = given or ask_secret("OpenAI's API key", variable="OPENAI_API_KEY")
    if not (key.isascii() and key.isprintable()):
        raise Failure("OpenAI's API key has invalid characters. Copy all of it.", ExitCode.SIGNED_OUT)
    api = Api(clean_url(url), key, service="OpenAI", sign_in="Check OPENAI_API_KEY.")
    context.call_on_close(api.close)
    return api


# --- the way of every import ------------------------------------------------------------------------------------------


def run_import(
    context: typer.Context,
    session: Session,
    plans: list[Plan],
    *,
    source: Source | None,
    folder: Path,
    settings: list[str],
    dry_run: bool,
    yes: bool,
) -> None:
    """Show the plans, send their files, show the prices and start the jobs; it asks before each of the two."""
    memory = Memory.open(folder, session.base_url)
    overrides = settings_of(settings)
    for plan in plans:
        plan.override(overrides)
        found = find_job(session.api, plan.key)
        plan.job = found if found and found["status"] not in (FAILED, "cancelled") else None
        plan.job_before = found["id"] if found else memory.jobs.get(plan.key, {}).get("job")
    new = [plan for plan in plans if plan.obstacle is None and plan.job is None]
    if not session.as_json:
        _show(plans)
    if new and not dry_run:
        confirm(
            f"Upload the files of {counted(len(new), 'job')} to {session.base_url}? Files cost nothing.",
            is_accepted=yes,
        )
        _start_all(session, new, source, memory, yes=yes)
    for plan in plans:
        if plan.job is not None:
            memory.add(plan, plan.job["id"])
    if not dry_run and memory.jobs:
        memory.keep()
    started = [plan for plan in new if plan.job is not None]
    is_refused = bool(plans) and all(plan.job is None and plan.obstacle for plan in plans)
    end = "No job can be imported. Each one's note says why." if is_refused else _end(started, dry_run)
    emit(context, {"object": "import", "data": [plan.as_json() for plan in plans]}, end)
    if is_refused or (not dry_run and any(plan.job is None for plan in new)):
        raise typer.Exit(ExitCode.REFUSED)


def _start_all(session: Session, new: list[Plan], source: Source | None, memory: Memory, *, yes: bool) -> None:
    for plan in new:
        try:
            if source is not None:
                fetch_files(plan, source, memory)
            convert_and_check(plan, memory)
        except Failure as failure:
            if failure.exit_code not in (ExitCode.NOT_FOUND, ExitCode.REFUSED):
                raise
            plan.obstacle = failure.message
    send_files(session, [plan for plan in new if plan.obstacle is None], memory)
    for plan in new:
        if plan.obstacle is None:
            quote(session.api, plan)
    ready = [plan for plan in new if plan.obstacle is None]
    if not session.as_json:
        rows = (
            (
                plan.key.partition(":")[2], plan.base_model,
                dollars(plan.quote["hold_usd"], is_limit=True) if plan.quote else None,
                plan.obstacle or (plan.quote or {}).get("pool"),
            )
            for plan in new
        )  # fmt: skip
        console().print(table(("FROM", "BASE MODEL HERE", "AT MOST", "NOTE"), rows))
    if not ready:
        return
    holds = [plan.quote["hold_usd"] for plan in ready if plan.quote and plan.quote["hold_usd"] is not None]
    total = str(sum(map(Decimal, holds))) if len(holds) == len(ready) else None
    confirm_price(total, f"Start {counted(len(ready), 'job')}?", is_accepted=yes)
    for plan in ready:
        memory.add(plan, start(session.api, plan)["id"])
        memory.keep()


def _show(plans: list[Plan]) -> None:
    rows = (
        (
            plan.key.partition(":")[2], plan.source_model, plan.base_model,
            f"exists: {plan.job['id']}" if plan.job else plan.obstacle or plan.base_reason,
        )
        for plan in plans
    )  # fmt: skip
    console().print(table(("FROM", "MODEL", "BASE MODEL HERE", "NOTE"), rows))
    for line in dict.fromkeys(setting.line for plan in plans if plan.job is None for setting in plan.settings):
        console().print(f"  {plain(line)}")


def _end(started: list[Plan], dry_run: bool) -> str:
    if dry_run:
        return "Nothing was uploaded."
    if not started:
        return "No job was started."
    ids = ", ".join(plan.job["id"] for plan in started if plan.job)
    if not any(plan.alias for plan in started):
        return f"Started {ids}.\nFollow them with `anneal import status`."
    return f"Started {ids}.\nRun `anneal import finish --wait`: it gives the old names to the new models."
