"""The compute step's table: one quote a row, with its badges, and the charts that go with the chosen one."""

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from apps.core.money import nano_to_usd, rated
from apps.estimates.gpus import GIB
from apps.estimates.quote import Estimate
from apps.finetuning.quoting import PoolQuote
from apps.web import svg

HOUR_MS = 3_600_000
ORDERS = (("", "Recommended"), ("cost", "Cost"), ("finish", "Finish"))
# What people tell apart, in the order of the bar; the estimate knows finer parts.
_GROUPS = (
    ("Weights", ("weights",)),
    ("Activations", ("activations",)),
    ("Adapter, optimizer", ("adapter", "gradients", "optimizer")),
    ("Logits and loss", ("logits",)),
    ("Dequantisation", ("dequantization",)),
    ("Framework, reserve", ("framework", "allocator")),
)


@dataclass(frozen=True, kw_only=True)
class ComputeRow:
    """One pool as the table shows it. `finish_seconds` is from now, wait included; None where nobody can know."""

    quoted: PoolQuote
    bar: svg.MemoryBar
    hourly_nano: int | None
    finish_seconds: float | None
    finish_at: datetime.datetime | None
    fix_text: str
    fix_url: str
    is_chosen: bool = False
    is_recommended: bool = False
    is_cheapest: bool = False
    is_fastest: bool = False

    @property
    def cost_nano(self) -> int | None:
        return self.quoted.estimate.cost_nano_p50


FixUrl = Callable[..., str]


def compute_rows(
    quotes: Sequence[PoolQuote], *, chosen: PoolQuote | None, order: str, now: datetime.datetime, fix_url: FixUrl
) -> list[ComputeRow]:
    """Return the table's rows in the order asked for; launchable ones first. `fix_url(**changes)` makes a link."""
    launchable = [quoted for quoted in quotes if quoted.is_launchable]
    has_choice = len(launchable) > 1
    cheapest = min(launchable, key=lambda quoted: quoted.estimate.cost_nano_p50 or 0) if has_choice else None
    fastest = min(launchable, key=lambda quoted: _finish_seconds(quoted) or 0) if has_choice else None
    rows = [
        _row(
            quoted, now, fix_url,
            is_chosen=quoted is chosen, is_recommended=bool(launchable) and quoted is launchable[0],
            is_cheapest=quoted is cheapest, is_fastest=quoted is fastest,
        )
        for quoted in quotes
    ]  # fmt: skip
    return sorted(rows, key=lambda row: _rank(row, order))


def _row(quoted: PoolQuote, now: datetime.datetime, fix_url: FixUrl, **marks: bool) -> ComputeRow:
    estimate, price = quoted.estimate, quoted.price
    seconds = _finish_seconds(quoted)
    text, url = _fix(quoted, fix_url)
    return ComputeRow(
        quoted=quoted,
        bar=svg.memory_bar(_parts(estimate), estimate.capacity_bytes / GIB),
        hourly_nano=rated(quantity=HOUR_MS, price_nano=price.price_nano, per=price.per) if price else None,
        finish_seconds=seconds,
        finish_at=now + datetime.timedelta(seconds=seconds) if seconds is not None else None,
        fix_text=text,
        fix_url=url,
        **marks,
    )


def _finish_seconds(quoted: PoolQuote) -> float | None:
    estimate = quoted.estimate
    if estimate.queue_seconds is None or estimate.train_seconds_p50 is None:
        return None
    return estimate.queue_seconds + estimate.startup_seconds + estimate.train_seconds_p50


def _fix(quoted: PoolQuote, fix_url: FixUrl) -> tuple[str, str]:
    """Return the first change that makes the job fit: as a link where it is one of the recipe, else as words."""
    for fix in quoted.estimate.fixes:
        need = f"{fix.peak_bytes / GIB:.1f} GB"
        if fix.key == "method" and fix.method:
            return f"QLoRA fits, {need}", fix_url(method=fix.method)
        if fix.key == "max_length" and fix.max_length:
            return f"{fix.max_length:,} tokens a row fit, {need}", fix_url(max_length=str(fix.max_length))
        return fix.text, ""
    return "", ""


def _rank(row: ComputeRow, order: str) -> tuple[bool, float]:
    """Python's sort is stable, so that the quotes' own order is the recommended one."""
    far = float("inf")
    by = {
        "cost": far if row.cost_nano is None else row.cost_nano,
        "finish": far if row.finish_seconds is None else row.finish_seconds,
    }
    return not row.quoted.is_launchable, by.get(order, 0.0)


def memory_parts(parts: Iterable[tuple[str, int]]) -> list[tuple[str, float]]:
    """Return the (key, bytes) parts of an estimate as a few (label, GiB) pairs, without empty ones."""
    amounts = dict(parts)
    sums = [(label, sum(amounts.get(key, 0) for key in keys) / GIB) for label, keys in _GROUPS]
    return [(label, amount) for label, amount in sums if amount > 0]


def memory_lines(row: ComputeRow, rows: Sequence[ComputeRow]) -> svg.MemoryLines:
    """Draw the chosen row's peak against the memory of every card on offer."""
    capacities = sorted({round(each.bar.capacity, 1) for each in rows})
    return svg.memory_lines(_parts(row.quoted.estimate), capacities, chosen=round(row.bar.capacity, 1), unit="GB")


def _parts(estimate: Estimate) -> list[tuple[str, float]]:
    return memory_parts((part.key, part.bytes) for part in estimate.parts)


def cost_scatter(rows: Sequence[ComputeRow], *, chosen: ComputeRow | None) -> svg.Scatter | None:
    """Draw cost against finish of every row that has both, or None when none has.

    A pool without a live worker is drawn as if one were free now.
    """
    options = [
        svg.Option(
            key=row.quoted.pool.name,
            label=row.quoted.pool.name,
            seconds=row.finish_seconds or row.quoted.estimate.startup_seconds + row.quoted.estimate.train_seconds_p50,
            cost=float(nano_to_usd(row.cost_nano)),
        )
        for row in rows
        if row.quoted.estimate.train_seconds_p50 is not None and row.cost_nano is not None
    ]
    return svg.scatter(options, chosen=chosen.quoted.pool.name if chosen else "") if options else None
