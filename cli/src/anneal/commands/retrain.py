"""`anneal retrain`: repeat a job on a schedule or when its dataset grows, and see what came of it."""

from typing import Annotated, Any

import typer

from anneal.api import item_path
from anneal.commands.requests import Body, amount_of, present, read_body
from anneal.output import AsJson, Limit, Yes, confirm_price, dollars, emit, emit_list, moment
from anneal.session import session_of

app = typer.Typer(no_args_is_help=True, help="Repeat jobs on a schedule or when data grows; promote better models.")
_PLANS = "/api/v1/fine_tuning/retraining_plans"

PlanId = Annotated[str, typer.Argument(metavar="PLAN", help="The id of a retraining plan, retplan_….")]


@app.command("list")
def list_plans(context: typer.Context, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List retraining plans, newest first."""
    head = ("ID", "NAME", "DATASET", "ALIAS", "DUE", "NEW ROWS", "AT MOST", "ENABLED")
    emit_list(context, session_of(context).api.pages(_PLANS, limit=limit), head, _cells)


def _cells(plan: dict[str, Any]) -> tuple[object, ...]:
    alias = plan["alias"] and plan["alias"]["name"]
    price, is_enabled = dollars(plan["max_usd"], is_limit=True), "yes" if plan["enabled"] else "no"
    due, rows = moment(plan["next_due_at"]), plan["min_new_rows"]
    return plan["id"], plan["name"], plan["dataset"]["name"], alias, due, rows, price, is_enabled


@app.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Of the plan.")],
    job: Annotated[str, typer.Option(help="The job to repeat, ftjob-…; it succeeded.")],
    dataset: Annotated[str, typer.Option(help="The dataset to train on: its newest version, each time.")],
    alias: Annotated[str, typer.Option(help="The alias of the model in production.")],
    max_cost: Annotated[str, typer.Option(help="The maximum cost of one retraining in dollars, comparisons included.")],
    held_out: Annotated[str | None, typer.Option(help="The dataset whose rows both models answer.")] = None,
    min_new_rows: Annotated[int | None, typer.Option(min=1, help="Start when there are this many new rows.")] = None,
    every: Annotated[str | None, typer.Option(help="days, week or month.")] = None,
    on: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --every days: the days between, up to 365; week: the day from 1, Monday; month: the day, up to "
            "28. Without it: 1.",
        ),
    ] = None,
    hour: Annotated[
        int | None, typer.Option(min=0, max=23, help="With --every: the hour in UTC. Without it: 0.")
    ] = None,
    body: Body = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Create a plan that repeats a job, and promotes its model only if it is significantly better.

    --body takes all fields of the API: regression rows, the least gain, and criteria.
    """
    if every is None and (on is not None or hour is not None):
        raise typer.BadParameter("Give --every too.", param_hint="--on, --hour")
    schedule = None if every is None else {"every": every, "value": on or 1, "hour_utc": hour or 0}
    request = read_body(body) | {"name": name, "source_job": job, "dataset": dataset, "alias": alias}
    most = str(amount_of(max_cost))
    request |= present(held_out=held_out, min_new_rows=min_new_rows, schedule=schedule, max_usd=most)
    confirm_price(most, "Let each retraining spend this?", is_accepted=yes)
    found = session_of(context).api.post_once(_PLANS, request)
    emit(context, found, f"{found['id']} is due {moment(found['next_due_at']) or 'when the dataset has grown'}.")


@app.command()
def start(context: typer.Context, plan: PlanId, yes: Yes = False, as_json: AsJson = False) -> None:
    """Begin a retraining now, on the newest version of the dataset."""
    api = session_of(context).api
    confirm_price(api.get(item_path(_PLANS, plan))["max_usd"], "Start?", is_accepted=yes)
    found = api.post_once(f"{item_path(_PLANS, plan)}/retrainings")
    emit(context, found, f"{found['id']} is {found['status']}. See it with `anneal retrain history {plan}`.")


@app.command()
def history(context: typer.Context, plan: PlanId, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List the retrainings of a plan, newest first, with the figures of each decision."""
    head = ("ID", "BEGAN", "BECAUSE OF", "STATUS", "JOB", "POINTS", "REASON")
    found = session_of(context).api.pages(f"{item_path(_PLANS, plan)}/retrainings", limit=limit)
    emit_list(context, found, head, _retraining_cells)


def _retraining_cells(found: dict[str, Any]) -> tuple[object, ...]:
    result = found["held_out"]
    points = result and "{difference_points:+.1f} ({low_points:+.1f} to {high_points:+.1f})".format(**result)
    began = moment(found["created_at"])
    return found["id"], began, found["trigger"], found["status"], found["job_id"], points, found["reason"]


@app.command()
def stop(context: typer.Context, plan: PlanId, as_json: AsJson = False) -> None:
    """Stop a plan. A retraining that has begun continues."""
    _set_enabled(context, plan, is_enabled=False)


@app.command()
def resume(context: typer.Context, plan: PlanId, as_json: AsJson = False) -> None:
    """Resume a plan that was stopped; it acts in the name of this key from now on."""
    _set_enabled(context, plan, is_enabled=True)


def _set_enabled(context: typer.Context, plan: str, *, is_enabled: bool) -> None:
    found = session_of(context).api.post(item_path(_PLANS, plan), {"enabled": is_enabled})
    emit(context, found, f"{found['id']} is {'enabled' if is_enabled else 'stopped'}.")


@app.command()
def delete(context: typer.Context, plan: PlanId, as_json: AsJson = False) -> None:
    """Delete a plan with its history. A job that it started continues."""
    found: dict[str, Any] = session_of(context).api.delete(item_path(_PLANS, plan))
    emit(context, found, f"{found['id']} is deleted.")
