"""`anneal estimate`: the installation's own pools and prices for an uploaded file, or published ones offline."""

from typing import Annotated, Any

import typer
from rich.table import Table

from anneal.output import AsJson, dollars, emit, span, table
from anneal.session import session_of
from apps.interfaces.cli.__main__ import main as estimate_offline

OFFLINE = {"allow_extra_args": True, "ignore_unknown_options": True}


def estimate(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="The base model.")] = None,
    file: Annotated[str | None, typer.Option(help="The id of an uploaded training file.")] = None,
    quantization: Annotated[str | None, typer.Option(help="nf4 for QLoRA.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU type, for an estimate without a server.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show memory, time and cost before anything starts.

    With --file, the installation answers for each of its pools. With --gpu, nothing is sent: the answer comes from
    published prices and speeds, and takes --method, --tokens, --rows, --seq, --rank, --gpus, --price, --within
    and more.
    """
    if gpu is not None and file is None:
        given = (("--model", model), ("--gpu", gpu), ("--json", "" if as_json else None))
        words = [word for name, value in given if value is not None for word in (name, value) if word]
        raise typer.Exit(estimate_offline(["estimate", *words, *context.args]))
    if context.args:
        raise typer.BadParameter(f"{context.args[0]} belongs to an offline estimate: give --gpu too.")
    if model is None or file is None:
        raise typer.BadParameter("Give --model and --file, or --model and --gpu.")
    body = {"model": model, "training_file": file, "quantization": quantization}
    found = session_of(context).api.post("/api/v1/estimates", {k: v for k, v in body.items() if v is not None})
    emit(context, found, lambda: options_table(found["pools"]))


def options_table(options: list[dict[str, Any]]) -> Table:
    """Return the options of an estimate or a dry run."""
    return table(
        ("OPTION", "GPU", "COST", "RANGE", "READY IN", "NOTE"),
        (
            (
                option["id"],
                option["gpu_type"],
                dollars(option["cost_usd"]["p50"]),
                f"{dollars(option['cost_usd']['p10'])} to {dollars(option['cost_usd']['p90'])}",
                span(option["finish_seconds"]["p50"]) if option["finish_seconds"] else None,
                option["block_reason"] or ", ".join(option["badges"]),
            )
            for option in options
        ),
    )
