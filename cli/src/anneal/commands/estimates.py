"""`anneal estimate`: the installation's own pools and prices for an uploaded file, or published ones offline."""

from typing import Annotated, Any

import typer
from rich.table import Table

from anneal.output import AsJson, dollars, emit, span, table
from anneal.session import session_of
from apps.estimates.machines import network_share
from apps.interfaces.cli.__main__ import main as estimate_offline

Nodes = Annotated[
    int | None, typer.Option(min=1, help="Machines of a pool that train together and share the GPUs evenly.")
]
OFFLINE = {"allow_extra_args": True, "ignore_unknown_options": True}


def estimate(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="The base model.")] = None,
    file: Annotated[str | None, typer.Option(help="The id of an uploaded training file.")] = None,
    quantization: Annotated[str | None, typer.Option(help="nf4 for QLoRA; offline, give --method qlora.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU type, for an estimate without a server.")] = None,
    nodes: Nodes = None,
    as_json: AsJson = False,
) -> None:
    """Show memory, time and cost before anything starts.

    With --file, the installation answers for each of its pools. With --gpu, nothing is sent: the answer comes from
    published prices and speeds, and takes --method, --rank, --targets, --seq, --batch, --micro-batch, --epochs,
    --tokens, --trained-tokens, --rows, --packing, --optimizer, --offload, --preference, --no-reference, --stack,
    --gpus, --host-memory, --price, --spot and --within.
    """
    if gpu is not None and file is not None:
        raise typer.BadParameter("Give --file to ask the installation, or --gpu for an offline estimate.")
    if gpu is not None:
        if quantization is not None:
            raise typer.BadParameter("--quantization belongs to --file. Offline, give --method qlora instead.")
        machines = None if nodes is None else str(nodes)
        given = (("--model", model), ("--gpu", gpu), ("--nodes", machines), ("--json", "" if as_json else None))
        words = [word for name, value in given if value is not None for word in (name, value) if word]
        raise typer.Exit(estimate_offline(["estimate", *words, *context.args]))
    if context.args:
        raise typer.BadParameter(f"{context.args[0]} belongs to an offline estimate: give --gpu too.")
    if model is None or file is None:
        raise typer.BadParameter("Give --model and --file, or --model and --gpu.")
    body = {"model": model, "training_file": file, "quantization": quantization, "node_count": nodes}
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
                option["block_reason"] or ", ".join(filter(None, [*option["badges"], machines_text(option)])),
            )
            for option in options
        ),
    )


def machines_text(option: dict[str, Any]) -> str:
    """Return the machines that share an option's GPUs, and what their network costs; "" for one machine."""
    if option["node_count"] == 1:
        return ""
    share = network_share((part["key"], part["seconds"]) for part in option["estimate"]["time_parts"])
    words = f"on {option['node_count']} machines"
    return words if share is None else f"{words}, whose network takes {share:.0%} of the billed time"
