"""`anneal evals`: grade what a model answers, by criteria of your own."""

from contextlib import nullcontext
from decimal import Decimal
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from anneal.api import item_path
from anneal.commands.files import find_path, uploaded
from anneal.commands.requests import Body, Metadata, amount_of, metadata_of, object_of, pair_of, present, read_body
from anneal.failures import ExitCode
from anneal.output import (
    AsJson,
    Limit,
    Yes,
    confirm_price,
    dollars,
    emit,
    emit_list,
    fields,
    moment,
    notice,
    plain,
    table,
)
from anneal.session import Session, session_of
from anneal.watching import COMPLETED, FAILED, watch_counts

app = typer.Typer(no_args_is_help=True, help="Grade a model's answers by your own criteria.")
_EVALS = "/v1/evals"
_ENDED = frozenset({COMPLETED, FAILED, "canceled"})
_SHOWN_CHARACTERS = 200
_ANSWER = "{{sample.output_text}}"
_ANY_ITEM = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}

EvalId = Annotated[str, typer.Argument(metavar="EVAL", help="The id of an eval, eval_….")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run, evalrun_….")]


# --- evals ------------------------------------------------------------------------------------------------------------


@app.command("list")
def list_evals(context: typer.Context, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List evals, newest first."""
    found = session_of(context).api.pages(_EVALS, limit=limit, order="desc")
    emit_list(context, found, ("ID", "NAME", "CRITERIA", "CREATED"), _eval_cells)


def _eval_cells(evaluated: dict[str, Any]) -> tuple[object, ...]:
    names = ", ".join(each["name"] for each in evaluated["testing_criteria"])
    return evaluated["id"], evaluated["name"], names, moment(evaluated["created_at"])


@app.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What is graded.")],
    check: Annotated[
        list[str] | None,
        typer.Option(help="An answer passes by eq, ne, like or ilike: eq={{item.answer}}. May be given again."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="An answer passes if it is not worse than that of this model.")
    ] = None,
    judge: Annotated[str | None, typer.Option(help="The model that compares both answers.")] = None,
    metadata: Metadata = None,
    body: Body = None,
    as_json: AsJson = False,
) -> None:
    """Create an eval from criteria. An answer passes if it meets all of them.

    --body takes all criteria of the API: similarity, labels and scores by a model.
    """
    if (baseline is None) != (judge is None):
        raise typer.BadParameter("Give both, or neither.", param_hint="--baseline, --judge")
    request = read_body(body)
    criteria = [*(request.get("testing_criteria") or ()), *map(_string_check, check or ())]
    if baseline is not None:
        criteria.append({"type": "pairwise_model", "name": "pairwise", "model": judge, "baseline_model": baseline})
    if not criteria:
        text = "Give a criterion: --check, --baseline with --judge, or testing_criteria in --body."
        raise typer.BadParameter(text, param_hint="--check")
    request = {"data_source_config": _ANY_ITEM} | request | {"name": name, "testing_criteria": criteria}
    request |= present(metadata=metadata_of(request, metadata))
    found = session_of(context).api.post_once(_EVALS, request)
    emit(context, found, lambda: _eval_text(found))


def _string_check(word: str) -> dict[str, str]:
    operation, reference = pair_of(word, "--check")
    found = {"type": "string_check", "operation": operation, "input": _ANSWER, "reference": reference}
    return found | {"name": f"{operation} {reference}"[:64]}


def _eval_text(evaluated: dict[str, Any]) -> str:
    return fields(
        [
            ("Eval", evaluated["id"]),
            ("Name", evaluated["name"]),
            ("Created", moment(evaluated["created_at"])),
            *(("Criterion", f"{each['name']} ({each['type']})") for each in evaluated["testing_criteria"]),
        ]
    )


@app.command()
def show(
    context: typer.Context,
    evaluated: EvalId,
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="The id of one of its runs.")] = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """Show an eval with its latest runs and how much passed in each, or one run with its pass rates."""
    api, place = session_of(context).api, item_path(_EVALS, evaluated)
    if run is not None:
        found = api.get(item_path(f"{place}/runs", run))
        emit(context, found, lambda: _run_text(found))
        return
    shown, runs = api.get(place), list(api.pages(f"{place}/runs", limit=limit, order="desc"))
    head = ("RUN", "STATUS", "MODEL", "PASSED", "CREATED")
    emit(
        context,
        shown | {"runs": runs},
        lambda: Group(Text(plain(_eval_text(shown))), "", table(head, map(_run_cells, runs))),
    )


def _run_cells(run: dict[str, Any]) -> tuple[object, ...]:
    return run["id"], run["status"], run["model"], _passed(run), moment(run["created_at"])


# --- runs -------------------------------------------------------------------------------------------------------------


@app.command("run")
def create_run(
    context: typer.Context,
    evaluated: EvalId,
    model: Annotated[
        str | None, typer.Option(help="The model that is asked. Without it, the answers in the file are graded.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="The items: a JSONL file here, or the id of an uploaded one.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The question: {{item.question}}. By default, the messages in item.input.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message before the question.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The maximum number of tokens of an answer.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Randomness; 0 picks the likeliest token.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The name of the run. By default, that of the eval.")] = None,
    metadata: Metadata = None,
    max_cost: Annotated[str | None, typer.Option(help="The maximum cost of the run, in dollars.")] = None,
    body: Body = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run until it ends.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Ask a model about each item of a file and grade its answers. It asks before it spends money.

    With --wait, it prints what share passed, and exits with 1 unless the run completes. Ctrl-C leaves it running.
    """
    session, place, sent = session_of(context), item_path(_EVALS, evaluated), read_body(body)
    params = present(max_completion_tokens=max_tokens, temperature=temperature)
    source = _source_of(
        object_of(sent, "data_source"), file=file, model=model, question=_question(prompt, system), params=params
    )
    limit = sent.get("max_cost_usd") if max_cost is None else max_cost
    limit = None if limit is None else str(amount_of(str(limit)))
    request = sent | present(name=name, metadata=metadata_of(sent, metadata), max_cost_usd=limit)
    criteria = session.api.get(place)["testing_criteria"]
    if "model" in source or any("model" in criterion for criterion in criteria):  # one that answers, or one that grades
        confirm_price(limit, f"Start{'' if limit else ' without --max-cost'}?", is_accepted=yes)
    with uploaded(session, file, purpose="evals", option="--file") if file else nullcontext() as file_id:
        if file_id is not None:
            source["source"] = {"type": "file_id", "id": file_id}
        run = session.api.post_once(f"{place}/runs", request | {"data_source": source})
    if wait:
        notice(f"Created {run['id']}.")
        run = _wait(session, run)
    emit(context, run, lambda: _run_text(run))
    if wait and run["status"] != COMPLETED:
        raise typer.Exit(ExitCode.NEGATIVE)


def _source_of(
    sent: dict[str, Any],
    *,
    file: str | None,
    model: str | None,
    question: dict[str, Any] | None,
    params: dict[str, Any],
) -> dict[str, Any]:
    """Return the data source of a run, which gets the id of its file later. Raises BadParameter."""
    if file is not None:
        find_path(file, "--file")
    elif "source" not in sent:
        raise typer.BadParameter("This option is required.", param_hint="--file")
    params = object_of(sent, "sampling_params") | params
    source = {"type": "jsonl"} | sent | present(model=model, input_messages=question, sampling_params=params or None)
    if model is not None:
        source["type"] = "completions"
        if file is not None:
            source.setdefault("input_messages", {"type": "item_reference", "item_reference": "item.input"})
    return source


def _question(prompt: str | None, system: str | None) -> dict[str, Any] | None:
    """Return the template of the messages that the model is asked, None without one. Raises BadParameter."""
    if prompt is None:
        if system is not None:
            raise typer.BadParameter("It stands before a question: give --prompt too.", param_hint="--system")
        return None
    given = (("system", system), ("user", prompt))
    return {"type": "template", "template": [{"role": role, "content": text} for role, text in given if text]}


def _wait(session: Session, run: dict[str, Any]) -> dict[str, Any]:
    words = f"{run['eval_id']} {run['id']}"
    return watch_counts(
        session.api,
        item_path(f"{item_path(_EVALS, run['eval_id'])}/runs", run["id"]),
        settled=_ENDED,
        counts=_counts,
        is_drawn=not session.as_json,
        farewell=f"{run['id']} goes on. Look at it with `anneal evals show {words}`, "
        f"or stop it with `anneal evals cancel {words}`.",
    )


def _counts(run: dict[str, Any]) -> tuple[int, int]:
    counts = run["result_counts"]
    return counts["passed"] + counts["failed"] + counts["errored"], counts["total"]


@app.command()
def cancel(context: typer.Context, evaluated: EvalId, run: RunId, as_json: AsJson = False) -> None:
    """Cancel a run. You pay for the answers so far."""
    place = item_path(f"{item_path(_EVALS, evaluated)}/runs", run)
    found = session_of(context).api.post(f"{place}/cancel")
    emit(context, found, lambda: _run_text(found))


@app.command()
def items(
    context: typer.Context,
    evaluated: EvalId,
    run: RunId,
    status: Annotated[str | None, typer.Option(help="Only items with this result: pass, fail or error.")] = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List the graded items of a run: the answer to each, and the criteria that it did not meet."""
    place = item_path(f"{item_path(_EVALS, evaluated)}/runs", run)
    found = session_of(context).api.pages(f"{place}/output_items", limit=limit, status=status)
    emit_list(context, found, ("ITEM", "RESULT", "NOT MET", "ANSWER"), _item_cells)


def _item_cells(item: dict[str, Any]) -> tuple[object, ...]:
    unmet = ", ".join(each["name"] for each in item["results"] if not each["passed"]) or None
    answers = [each["content"] for each in item["sample"]["output"]]
    problem = (item["sample"]["error"] or {}).get("message")
    return item["datasource_item_id"], item["status"], unmet, problem or "".join(answers)[:_SHOWN_CHARACTERS]


def _run_text(run: dict[str, Any]) -> str:
    """Return what a person wants to know of a run: its pass rates, what it may cost, and why it failed."""
    counts = run["result_counts"]
    by_criterion = (
        (f"Passed {each['testing_criteria']}", _share(each["passed"], each["passed"] + each["failed"]))
        for each in run["per_testing_criteria_results"]
    )
    return fields(
        [
            ("Run", run["id"]),
            ("Eval", run["eval_id"]),
            ("Name", run["name"]),
            ("Status", run["status"]),
            ("Model", run["model"]),
            ("Items", counts["total"] or None),
            ("Passed", _passed(run)),
            *by_criterion,
            ("Without a grade", counts["errored"] or None),
            ("Can cost at most", dollars(run["highest_cost_usd"], is_limit=True)),
            ("Error", (run["error"] or {}).get("message")),
        ]
    )


def _passed(run: dict[str, Any]) -> str | None:
    """Return how many of the graded items passed, and their share. Items without a grade did not pass."""
    done, _ = _counts(run)
    return _share(run["result_counts"]["passed"], done)


def _share(passed: int, count: int) -> str | None:
    return f"{passed:,} of {count:,} ({Decimal(100 * passed) / count:.1f} %)" if count else None
