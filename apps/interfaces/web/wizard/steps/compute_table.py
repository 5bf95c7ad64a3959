"""The compute step's table, with one option per row and its badges, and the charts of the chosen option."""

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from django.utils.translation import gettext, ngettext

from apps.core.messages.translation import later
from apps.core.money import nano_to_usd, rated
from apps.core.templatetags.ui import about, memory, usd, usd_hour
from apps.estimates.physics.gpus import GIB
from apps.estimates.quote import Estimate
from apps.estimates.ranking import Ranking
from apps.finetuning.quotes.options import PoolQuote, Remedy, finish_seconds
from apps.interfaces.web.charts import memory_charts, scatter_charts
from apps.interfaces.web.wizard.recipe_words import machine_words, on_machines

HOUR_MS = 3_600_000
ORDERS = (("", later("Recommended")), ("cost", later("Cost")), ("finish", later("Finish")))
_FAR_COST = 4  # times the cheapest cost: above it, an option that another one beats is not drawn
_DATED_SECONDS = 20 * 3600  # a finish later than this is shown with its date
_LABELLED_POINTS = 8  # of the scatter; with more points, only the important ones are labelled
ROW_GROUPS = (later("Available now"), later("Not available now"), later("Does not fit"))
# The memory groups that people distinguish, in the order of the bar. The estimate has finer parts.
_GROUPS = (
    (later("Weights"), ("weights",)),
    (later("Activations"), ("activations",)),
    (later("Adapter, optimizer"), ("adapter", "gradients", "optimizer")),
    (later("Logits and loss"), ("logits",)),
    (later("Dequantisation"), ("dequantization",)),
    (later("Framework, reserve"), ("framework", "allocator")),
)
_BOTTLENECKS = {
    "compute": later("arithmetic"),
    "memory_bandwidth": later("memory bandwidth"),
    "interconnect": later("the link between GPUs"),
    "host_link": later("the link to the host's memory"),
    "fixed_cost": later("fixed cost of each step"),
}


@dataclass(frozen=True, kw_only=True)
class TableView:
    """How the table is shown. `way_url(**changes)` returns the link that applies changes to the recipe."""

    chosen: PoolQuote | None
    now: datetime.datetime
    ranking: Ranking = field(default_factory=Ranking)
    order: str = ""
    needed_by: datetime.datetime | None = None
    way_url: Callable[..., str] = lambda **_: ""


@dataclass(frozen=True, kw_only=True)
class RemedyRow:
    """One change that makes a job fit. Without a url it cannot be applied here."""

    text: str
    short: str
    url: str
    cost_nano: int | None
    note: str


class DeadlineMark(NamedTuple):
    """The mark of an option that meets or misses the deadline: an icon, a word for screen readers, and a tone."""

    icon: str
    word: str
    tone: str


_DEADLINE_MARKS = {
    "yes": DeadlineMark("circle-check", later("In time"), ""),
    "maybe": DeadlineMark("triangle-alert", later("May be late"), "warn"),
    "no": DeadlineMark("circle-x", later("Late"), "bad"),
}


@dataclass(frozen=True, kw_only=True)
class ComputeRow:
    """One option as the table shows it.

    `finish_seconds` counts from now and includes the queue. If no worker is online, it assumes a free worker; it is
    None if it cannot be known. `finish_at` and `late_at` are None without a worker.

    `in_time` is "yes" if the 90th percentile meets the deadline, "maybe" if only the median does, else "no".
    """

    quoted: PoolQuote
    bar: memory_charts.MemoryBar
    hourly_nano: int | None
    finish_seconds: float | None
    finish_at: datetime.datetime | None
    late_at: datetime.datetime | None
    in_time: str
    ways: tuple[RemedyRow, ...]
    is_chosen: bool = False
    is_recommended: bool = False
    is_cheapest: bool = False
    is_fastest: bool = False

    @property
    def cost_nano(self) -> int | None:
        return self.quoted.estimate.cost_nano_p50

    @property
    def name(self) -> str:
        """The name of the GPU, with the number of GPUs if there are several."""
        gpu, count = self.quoted.pool.gpu_type.name, self.quoted.gpu_count
        return gpu if count == 1 else f"{count} × {gpu}"

    @property
    def bottleneck(self) -> str:
        return _BOTTLENECKS.get(self.quoted.estimate.bottleneck or "", "")

    @property
    def utilisation_percent(self) -> int | None:
        share = self.quoted.estimate.utilisation
        return None if share is None else round(share * 100)

    @property
    def group(self) -> int:
        """The row's place in ROW_GROUPS."""
        return 2 if not self.quoted.estimate.fits else 0 if self.quoted.is_launchable else 1

    @property
    def group_label(self) -> str:
        return ROW_GROUPS[self.group]

    # --- The cells as text: computed from a few values per row, because a table can have a hundred options ---

    @property
    def css(self) -> str:
        state = "off" if not self.quoted.estimate.fits else "" if self.quoted.is_launchable else "blocked"
        return f"{state} has-ways" if self.ways else state

    @property
    def where(self) -> str:
        estimate, pool, count = self.quoted.estimate, self.quoted.pool, self.quoted.gpu_count
        cards = f"{count} × " if count > 1 else ""
        nodes = self.quoted.node_count
        name = pool.name if nodes == 1 else f"{pool.name}, {on_machines(nodes)}"
        return f"{name}, {cards}{memory(estimate.capacity_bytes)}, {usd_hour(self.hourly_nano)}, {pool.region_id}"

    @property
    def machines(self) -> str:
        """The number of machines, and the share of time that their network takes."""
        parts = self.quoted.estimate.time_parts
        return machine_words(self.quoted.node_count, [(part.key, part.seconds) for part in parts])

    @property
    def is_too_large(self) -> bool:
        """Whether the job does not fit into the GPU's memory, as the bar says."""
        estimate = self.quoted.estimate
        return not estimate.fits and estimate.peak_bytes_p90 > estimate.capacity_bytes

    @property
    def memory_words(self) -> str:
        if self.is_too_large:
            return gettext("Needs %(peak_bytes)s") % {"peak_bytes": memory(self.quoted.estimate.peak_bytes)}
        return (
            gettext("%(percent)s%%, little headroom") % {"percent": self.bar.percent}
            if self.bar.tight
            else f"{self.bar.percent}%"
        )

    @property
    def memory_tone(self) -> str:
        return "bad" if self.is_too_large else "warn" if self.bar.tight else "faint"

    @property
    def free(self) -> str:
        estimate = self.quoted.estimate
        return (
            gettext("%(headroom_bytes)s free") % {"headroom_bytes": memory(estimate.headroom_bytes)}
            if estimate.fits
            else ""
        )

    @property
    def short_way(self) -> RemedyRow | None:
        """The first remedy, if it can be applied here and has a short text to show beside the bar."""
        first = self.ways[0] if self.ways else None
        return first if first and first.url and first.short else None

    @property
    def speed(self) -> str:
        rate = self.quoted.estimate.tokens_per_second
        return f"{rate:,.0f}" if rate else ""

    @property
    def moment_style(self) -> str:
        return "datetime" if (self.finish_seconds or 0) > _DATED_SECONDS else "time"

    @property
    def wait(self) -> str:
        queue = self.quoted.estimate.queue_seconds
        whole = about(self.finish_seconds)
        return gettext("%(whole)s, %(queue)s in queue") % {"whole": whole, "queue": about(queue)} if queue else whole

    @property
    def deadline(self) -> DeadlineMark | None:
        return _DEADLINE_MARKS.get(self.in_time)

    @property
    def cost(self) -> str:
        return usd(self.cost_nano)

    @property
    def cost_range(self) -> str:
        low, high = usd(self.quoted.estimate.cost_nano_p10), usd(self.quoted.estimate.cost_nano_p90)
        return "" if low == high else f"{low}–{high}"


def compute_rows(quotes: Sequence[PoolQuote], *, view: TableView) -> list[ComputeRow]:
    """Return the table's rows in the requested order.

    Options that can start now come first; those that do not fit come last.
    """
    has_choice = sum(quoted.is_launchable for quoted in quotes) > 1
    rows = [_row(quoted, view, has_choice=has_choice) for quoted in quotes]
    return sorted(rows, key=lambda row: _rank(row, view.order))


def _row(quoted: PoolQuote, view: TableView, *, has_choice: bool) -> ComputeRow:
    estimate, price, ranking = quoted.estimate, quoted.price, view.ranking
    finish = finish_seconds(estimate)
    is_known = finish is not None and estimate.queue_seconds is not None
    hourly_nano = rated(quantity=HOUR_MS, price_nano=price.price_nano, per=price.per) if price else None
    return ComputeRow(
        quoted=quoted,
        bar=memory_charts.memory_bar(_parts(estimate), estimate.capacity_bytes / GIB),
        hourly_nano=hourly_nano * quoted.gpu_count if hourly_nano is not None else None,
        finish_seconds=finish[1] if finish else None,
        finish_at=view.now + datetime.timedelta(seconds=finish[1]) if finish and is_known else None,
        late_at=view.now + datetime.timedelta(seconds=finish[2]) if finish and is_known else None,
        in_time=_in_time(finish, view) if finish else "",
        ways=tuple(_remedy_row(way, view) for way in quoted.ways),
        is_chosen=quoted is view.chosen,
        is_recommended=quoted.is_launchable and ranking.recommended == quoted.key,
        is_cheapest=has_choice and quoted.is_launchable and ranking.cheapest == quoted.key,
        is_fastest=has_choice and quoted.is_launchable and ranking.fastest == quoted.key,
    )


def _in_time(finish: tuple[float, float, float], view: TableView) -> str:
    if view.needed_by is None:
        return ""
    left = (view.needed_by - view.now).total_seconds()
    return "yes" if finish[2] <= left else "maybe" if finish[1] <= left else "no"


def _remedy_row(way: Remedy, view: TableView) -> RemedyRow:
    fix = way.fix
    changes: dict[str, object] = {name: str(value) for name, value in way.changes.items()}
    if way.pool:
        changes["pool"] = way.pool
    short = {
        "method": gettext("QLoRA fits") if fix.method == "qlora" else gettext("LoRA fits"),
        "max_length": gettext("%(tokens)s tokens a row fit") % {"tokens": f"{fix.max_length or 0:,}"},
    }.get(fix.key, "")
    return RemedyRow(
        text=fix.text,
        short=f"{short}, {fix.peak_bytes / GIB:.1f} GiB" if short else "",
        url=view.way_url(**changes) if changes else "",
        cost_nano=way.cost_nano,
        note=way.note,
    )


def _rank(row: ComputeRow, order: str) -> tuple[int, bool, float]:
    """Return the sort key of a row. Within its group, rows go by cost or finish, or the recommended one comes first.

    Python's sort is stable, so ties keep the quotes' own order, by cost.
    """
    far = float("inf")
    by = {
        "cost": far if row.cost_nano is None else row.cost_nano,
        "finish": far if row.finish_seconds is None else row.finish_seconds,
    }
    return row.group, not row.is_recommended and order not in by, by.get(order, 0.0)


def memory_parts(parts: Iterable[tuple[str, int]]) -> list[tuple[str, float]]:
    """Return the (key, bytes) parts of an estimate as a few (label, GiB) pairs, without empty ones.

    A part that belongs to no group is shown under its own key, so the bar always adds up to the peak.
    """
    amounts = dict(parts)
    known = {key for _, keys in _GROUPS for key in keys}
    groups = (*_GROUPS, *((key.replace("_", " ").capitalize(), (key,)) for key in amounts if key not in known))
    sums = [(label, sum(amounts.get(key, 0) for key in keys) / GIB) for label, keys in groups]
    return [(label, amount) for label, amount in sums if amount > 0]


def memory_lines(row: ComputeRow, rows: Sequence[ComputeRow]) -> memory_charts.MemoryLines:
    """Draw the row's peak against the memory of every card on offer."""
    capacities = sorted({round(each.bar.capacity, 1) for each in rows})
    return memory_charts.memory_lines(_parts(row.quoted.estimate), capacities, chosen=round(row.bar.capacity, 1))


def _parts(estimate: Estimate) -> list[tuple[str, float]]:
    return memory_parts((part.key, part.bytes) for part in estimate.parts)


def cost_scatter(
    rows: Sequence[ComputeRow], *, chosen: ComputeRow | None, view: TableView
) -> scatter_charts.Scatter | None:
    """Draw cost against finish time for every row that has both; return None if none has.

    A pool without a live worker is drawn as if one were free now. With many options, only the chosen one and those that
    no other option beats are labelled. Other options that cost many times the cheapest are left out, because they would
    squeeze the rest into a corner; the table beside the chart lists all.
    """
    timed = [(row, finish_seconds(row.quoted.estimate)) for row in rows]
    priced = [(row, finish) for row, finish in timed if finish and row.cost_nano is not None]
    named = {*view.ranking.front, chosen.quoted.key if chosen else ""}
    most = _FAR_COST * min((row.cost_nano or 0 for row, _ in priced), default=0)
    drawn = [(row, finish) for row, finish in priced if row.quoted.key in named or (row.cost_nano or 0) <= most]
    options = [
        scatter_charts.Option(
            key=row.quoted.key,
            label=row.quoted.key if len(drawn) <= _LABELLED_POINTS or row.quoted.key in named else "",
            title=f"{row.quoted.key}: {usd(row.cost_nano)}, {about(finish[1])}",
            seconds=finish[1],
            cost=float(nano_to_usd(row.cost_nano or 0)),
            muted=not row.quoted.is_launchable,
        )
        for row, finish in drawn
    ]
    deadline = (view.needed_by - view.now).total_seconds() if view.needed_by else None
    key = chosen.quoted.key if chosen else ""
    return scatter_charts.scatter(options, chosen=key, deadline_seconds=deadline) if options else None


@dataclass(frozen=True, kw_only=True)
class PictureRow:
    """One option of the chart: seconds from now to its finish, and its cost."""

    key: str
    p50: float
    p90: float
    cost_nano: int
    is_on_front: bool


def picture_rows(rows: Sequence[ComputeRow], *, view: TableView) -> list[PictureRow]:
    """Return the chart's values for the table beside it, soonest first."""
    listed = [
        PictureRow(
            key=row.quoted.key,
            p50=finish[1],
            p90=finish[2],
            cost_nano=row.cost_nano,
            is_on_front=row.quoted.key in view.ranking.front,
        )
        for row in rows
        if row.cost_nano is not None and (finish := finish_seconds(row.quoted.estimate))
    ]
    return sorted(listed, key=lambda item: item.p50)


def scatter_label(rows: Sequence[ComputeRow], *, view: TableView) -> str:
    """Return a sentence that describes the chart."""
    listed = picture_rows(rows, view=view)
    if not listed:
        return ""
    soonest, cheapest = listed[0], min(listed, key=lambda item: item.cost_nano)
    text = ngettext(
        "Cost against finish time of %(count)d option. Soonest: %(soonest)s. Cheapest: %(cheapest)s. The table below "
        "holds every value.",
        "Cost against finish time of %(count)d options. Soonest: %(soonest)s. Cheapest: %(cheapest)s. The table below "
        "holds every value.",
        len(listed),
    )
    names = [f"{each.key}, {about(each.p50)}, {usd(each.cost_nano)}" for each in (soonest, cheapest)]
    return text % {"count": len(listed), "soonest": names[0], "cheapest": names[1]}
