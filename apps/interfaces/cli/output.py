"""The output of `anneal estimate`: a table with the best option's memory by part, or one JSON object."""

import json
from collections.abc import Callable, Sequence

import msgspec

from apps.estimates.machines import network_share
from apps.estimates.models.architectures import parameter_count
from apps.estimates.physics.gpus import GIB
from apps.estimates.quote import Estimate, QuoteRequest
from apps.estimates.ranking import Ranking
from apps.interfaces.cli.answers import Answer
from apps.interfaces.cli.catalog import Model
from apps.interfaces.cli.errors import BadOption

NANO_PER_USD = 1_000_000_000
_HEAD = ("GPU", "Fits", "Memory", "Tokens/s", "Used", "Limited by", "Time", "Cost", "")
BADGES = ("recommended", "cheapest", "fastest")
_LEFT = {0, 1, 5, 8}
_BOTTLENECKS = {"memory_bandwidth": "bandwidth", "fixed_cost": "fixed cost", "host_link": "host link"}


def as_text(
    *, model: Model, request: QuoteRequest, answers: Sequence[Answer], ranking: Ranking, within_hours: float | None
) -> str:
    """Return the table, the best option's memory by part, and changes that would make a job fit if it does not."""
    ordered = sorted(answers, key=_order)
    lines = [_title(model, request), "", *_table([_HEAD, *(_row(answer, ranking) for answer in ordered)])]
    wanted = ranking.recommended or ranking.fastest
    best = next((answer for answer in ordered if answer.key == wanted), ordered[0])
    lines += ["", *_memory(best)]
    if within_hours is not None and ranking.recommended is None:
        lines += ["", f"Nothing is done within {within_hours:g} h in nine cases of ten."]
    return "\n".join([*lines, "", *_notes(ordered, best)]) + "\n"


def as_json(
    *, model: Model, request: QuoteRequest, answers: Sequence[Answer], ranking: Ranking, within_hours: float | None
) -> str:
    """Return one object: the request as understood, every answer, and the recommended one."""
    question = {name: value for name, value in msgspec.to_builtins(request).items() if name != "architecture"}
    return (
        json.dumps(
            {
                "model": model.name,
                "parameters": parameter_count(model.architecture),
                "request": question,
                "within_hours": within_hours,
                "ranking": {name: getattr(ranking, name) for name in BADGES} | {"pareto_front": list(ranking.front)},
                "options": [_option(answer) for answer in answers],
            },
            indent=2,
        )
        + "\n"
    )


def error_text(error: BadOption, *, as_json: bool) -> str:
    """Return the error message: the option, what is wrong with it, and existing names."""
    if as_json:
        found = {"message": error.message, "type": "cli_error", "param": error.option, "code": None, "near": error.near}
        return json.dumps({"error": found}) + "\n"
    meant = f" Did you mean {_or(error.near)}?" if error.near else ""
    return f"anneal: error: {error.option}: {error.message}.{meant}\n"


def _option(answer: Answer) -> dict[str, object]:
    price = answer.price
    return {
        "id": answer.key,
        "gpu": answer.gpu.name,
        "node_count": answer.node_count,
        "price_usd_per_gpu_hour": price.usd_per_hour if price else None,
        "price_origin": price.origin if price else None,
        "estimate": msgspec.to_builtins(answer.estimate),
    }


def _title(model: Model, request: QuoteRequest) -> str:
    name = {"lora": "LoRA", "qlora": "QLoRA"}.get(request.method, "full fine-tuning")
    name = f"{name} with DoRA" if request.use_dora else f"rank-stabilised {name}" if request.use_rslora else name
    name += f" on preferences ({'DPO' if request.has_reference else 'ORPO'})" if request.is_preference else ""
    rank = "" if request.method == "full" else f", rank {request.lora_rank}"
    return (
        f"{model.name}, {parameter_count(model.architecture) / 1e9:.2f} B parameters: {name}{rank}, "
        f"{request.tokens * request.epochs / 1e6:,.1f} M tokens in {request.rows:,} rows x {request.epochs} "
        f"epoch{'' if request.epochs == 1 else 's'}, rows up to {request.max_length:,}, batch {request.batch_size}"
    )


def _row(answer: Answer, ranking: Ranking) -> tuple[str, ...]:
    estimate = answer.estimate
    badges = [name for name in BADGES if getattr(ranking, name) == answer.key]
    return (
        answer.gpu.key if estimate.gpu_count == 1 else f"{estimate.gpu_count} x {answer.gpu.key}",
        "yes" if estimate.fits else "no",
        f"{estimate.peak_bytes / GIB:.1f} of {estimate.capacity_bytes / GIB:.1f} GiB",
        "-" if estimate.tokens_per_second is None else f"{estimate.tokens_per_second:,.0f}",
        "-" if estimate.utilisation is None else f"{estimate.utilisation:.0%}",
        _BOTTLENECKS.get(estimate.bottleneck or "", estimate.bottleneck or "-"),
        _range(estimate, "train_seconds", _span),
        _range(estimate, "cost_nano", _dollars),
        ", ".join(badges),
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _memory(answer: Answer) -> list[str]:
    estimate = answer.estimate
    parts = [(part.label, f"{part.bytes / GIB:.2f}") for part in estimate.parts if part.bytes]
    width = max((len(label) for label, _ in parts), default=0)
    plan = estimate.plan
    how = f"micro-batch {plan.micro_batch_size} x {plan.gradient_accumulation_steps}"
    how += ", checkpointed" if plan.gradient_checkpointing else ""
    lines = [f"Memory on {answer.key} at the peak ({estimate.phase}), {how}, in GiB"]
    lines += [f"  {label.ljust(width)}  {amount.rjust(8)}" for label, amount in parts]
    if estimate.host_bytes:
        lines += [f"  {estimate.host_bytes / GIB:,.1f} GiB of the machine's own memory beside"]
    lines += [f"  {'free'.ljust(width)}  {estimate.headroom_bytes / GIB:8.2f}"] if estimate.fits else []
    if not estimate.fits:
        lines += [f"{estimate.reason}", "Ways to make it fit:"]
        for fix in estimate.fixes:
            price = "" if fix.cost_nano_p50 is None else f" ({_dollars(fix.cost_nano_p50)})"
            lines.append(f"  {fix.text}{price}")
    return lines


def _notes(answers: Sequence[Answer], best: Answer) -> list[str]:
    origin = best.estimate.interval_origin
    lines = [f"Speed: {best.estimate.speed_source.text}."]
    lines += [f"Ranges are the 10th to 90th percentile: {origin}."] if origin else []
    if best.estimate.reference_seconds:
        lines.append(
            f"Before training the base judges every row: {_span(best.estimate.reference_seconds)}, not billed."
        )
    if best.node_count > 1:
        share = network_share((part.key, part.seconds) for part in best.estimate.time_parts)
        network = "" if share is None else f", whose network takes {share:.0%} of the time and cost"
        lines.append(f"{best.key} is on {best.node_count} machines{network}.")
    if best.estimate.is_spot and best.estimate.train_seconds_p50 is not None:
        redone = _span(best.estimate.redone_seconds)
        lines.append(
            f"Spot: {best.estimate.interruptions:.2g} interruptions expected, {redone} of work redone and billed."
        )
    prices = {answer.price.origin for answer in answers if answer.price}
    if best.price:
        lines.append(f"Price of {best.gpu.key}: ${best.price.usd_per_hour:.2f} an hour and GPU, {best.price.origin}.")
    elif not prices:
        lines.append("No price: say one with --price.")
    return lines


def _order(answer: Answer) -> tuple[bool, float, str]:
    cost = answer.estimate.cost_nano_p50
    return not answer.estimate.fits, float("inf") if cost is None else cost, answer.key


def _range(estimate: Estimate, name: str, write: Callable[[int], str]) -> str:
    low, middle, high = (getattr(estimate, f"{name}_{percentile}") for percentile in ("p10", "p50", "p90"))
    return "-" if middle is None else f"{write(middle)} ({write(low)} to {write(high)})"


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return (
        f"{minutes} min"
        if minutes < 90
        else f"{seconds / 3600:.1f} h"
        if seconds < 172_800
        else f"{seconds / 86_400:.1f} d"
    )


def _dollars(nano: int) -> str:
    return f"${nano / NANO_PER_USD:,.2f}"


def _or(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
