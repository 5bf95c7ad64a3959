"""What commands print: text for people, or with --json the API's own objects."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from decimal import ROUND_CEILING, Decimal
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table

from anneal.failures import ExitCode, Failure
from anneal.session import session_of

# Texts of files, models and servers must not control the terminal.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_WIDTH = 200  # where the output is no terminal, so that nothing is cut


def _remember(context: typer.Context, value: bool) -> bool:
    session_of(context).as_json = value
    return value


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.", callback=_remember)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Accept the price without a question.")]
SureToDelete = Annotated[bool, typer.Option("--yes", "-y", help="Delete it without a question.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="How many.")]
Shown = str | Table | Group


def console(*, is_error: bool = False) -> Console:
    stream = sys.stderr if is_error else sys.stdout
    return Console(
        file=stream,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=True,
        width=None if stream.isatty() else _WIDTH,
    )


def emit(context: typer.Context, data: object, text: Shown | Callable[[], Shown]) -> None:
    """Print the data as JSON if that was asked for, else the text."""
    if session_of(context).as_json:
        sys.stdout.write(_json(data, indent=2))
    else:
        shown = text() if callable(text) else text
        console().print(plain(shown) if isinstance(shown, str) else shown, soft_wrap=isinstance(shown, str))


def emit_list(
    context: typer.Context,
    found: Iterable[dict[str, Any]],
    head: Sequence[str],
    cells: Callable[[dict[str, Any]], Sequence[object]],
) -> None:
    """Print a list: as a table with a row of cells for each object, or as the API's list."""
    data = list(found)
    emit(context, {"object": "list", "data": data}, lambda: table(head, map(cells, data)))


def emit_secret(context: typer.Context, found: dict[str, Any]) -> None:
    """Print a new object: with --json all of it, else only its secret, so that it can be piped."""
    if not session_of(context).as_json:
        notice(f"The secret of {found['id']} is shown only now:")
    emit(context, found, found["secret"])


def emit_line(data: object) -> None:
    """Print one object as one line of JSON."""
    sys.stdout.write(_json(data))
    sys.stdout.flush()


def _json(data: object, *, indent: int | None = None) -> str:
    """Return lines of JSON that any output can take: only UTF-8 gets more than ASCII, the rest is escaped."""
    is_utf_8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(data, indent=indent, ensure_ascii=not is_utf_8) + "\n"


def notice(text: str) -> None:
    """Print what is not the result, so that the result can be piped."""
    console(is_error=True).print(plain(text))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*("-" if cell is None else plain(str(cell)) for cell in row))
    return shown


def plain(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def confirm_price(usd: str | None, question: str, *, is_accepted: bool) -> None:
    """Ask before money is spent. Raises Failure if the price is declined, or if there is no one to answer."""
    price = "No price is known." if usd is None else f"At most {dollars(usd, is_limit=True)}."
    confirm(f"{price} {question}", is_accepted=is_accepted, instead="accept the price")


def confirm_deletion(name: str, *, is_accepted: bool) -> None:
    """Ask before something is deleted. Raises Failure as `confirm`."""
    confirm(f"Delete {name}?", is_accepted=is_accepted, instead="delete it", outcome="deleted")


def confirm(question: str, *, is_accepted: bool, instead: str = "agree", outcome: str = "started") -> None:
    """Ask before something happens. Raises Failure if it is declined, or if there is no one to answer."""
    try:
        if is_accepted or typer.confirm(question, err=True):
            return
    except typer.Abort:
        sys.stderr.write("\n")
    raise Failure(f"Nothing was {outcome}. Pass --yes to {instead} without a question.", ExitCode.NEGATIVE)


def ask_secret(name: str, *, variable: str) -> str:
    """Return a secret from a prompt, or without a terminal from a line of standard input.

    Raises Failure that names the environment variable if there is no line.
    """
    if sys.stdin.isatty():
        return str(typer.prompt(name, hide_input=True, err=True)).strip()
    if given := sys.stdin.readline().strip():
        return given
    raise Failure(f"{name}: there is no terminal to ask for it. Set {variable}.", ExitCode.SIGNED_OUT)


def dollars(usd: str | None, *, is_limit: bool = False) -> str | None:
    """Return an amount for people: cents, or two digits of less than a cent. A limit is rounded up."""
    if usd is None:
        return None
    amount = abs(Decimal(usd))
    digits = 2 if amount == 0 or amount >= Decimal("0.01") else 1 - amount.adjusted()
    step = Decimal(1).scaleb(-digits)
    sign = "-" if Decimal(usd) < 0 else ""
    return f"{sign}${amount.quantize(step, rounding=ROUND_CEILING) if is_limit else round(amount, digits):,f}"


def moment(unix: float | None) -> str | None:
    return None if unix is None else datetime.fromtimestamp(unix).strftime("%Y-%m-%d %H:%M:%S")


def span(seconds: float | None) -> str | None:
    """Return a duration in its two largest units."""
    if seconds is None:
        return None
    whole = math.ceil(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def fields(pairs: Iterable[tuple[str, Any]]) -> str:
    """Return lines of names and values, without those that have no value."""
    kept = [(name, str(value)) for name, value in pairs if value is not None and value != ""]
    width = max((len(name) for name, _ in kept), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in kept)
