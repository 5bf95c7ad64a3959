"""Template filters and tags for figures, times, states and form controls. Pure: values in, short text out."""

import datetime
import json
import re
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from functools import cache, lru_cache

from django import template
from django.conf import settings
from django.forms import (
    BoundField,
    CheckboxInput,
    CheckboxSelectMultiple,
    FileInput,
    RadioSelect,
    Select,
    Textarea,
    Widget,
)
from django.template.defaulttags import CsrfTokenNode
from django.templatetags.static import static
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, gettext_noop

from apps.core.messages.translation import later, translated
from apps.core.money import dollars, nano_to_usd
from apps.core.templatetags.statuses import STATUSES, StatusLabel

register = template.Library()
register.filter(translated)

MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"
GIB = 1 << 30
_METHODS = {"lora": "LoRA", "qlora": "QLoRA", "full": later("Full fine-tuning")}
_ROLES = (gettext_noop("owner"), gettext_noop("admin"), gettext_noop("member"), gettext_noop("viewer"))
_ICON = '<svg class="{}" {}><use href="{}#{}"/></svg>'
_TICKED = re.compile("`([^`]+)`")
_UNNAMED = SafeString('aria-hidden="true"')
DJANGO_TEXTAREA_ROWS = "10"  # Django's value if a form did not choose one


class _FormTokensNode(CsrfTokenNode):
    def render(self, context: template.Context) -> SafeString:
        selection = context.get("selection", "")
        field = format_html('<input type="hidden" name="selection" value="{}">', selection) if selection else ""
        return SafeString(super().render(context) + field)


@register.tag
def csrf_token(parser: template.base.Parser, token: template.base.Token) -> _FormTokensNode:
    """Render Django's token and the page's selection (apps.interfaces.web.shell.access), which each form has."""
    return _FormTokensNode()


@register.filter
def status(value: str) -> StatusLabel:
    """Return the display of a state. An unlisted state is shown by its name, without colour."""
    return STATUSES.get(value) or StatusLabel(value.replace("_", " ").capitalize())


@register.filter
def usd(nano: int | None) -> str:
    """Format nano-USD as dollars ($1.24); below a cent, as cents with two significant digits (0.046¢, not $0.00)."""
    if nano is None:
        return NONE
    amount = nano_to_usd(abs(nano))
    sign = MINUS if nano < 0 else ""
    if 0 < amount < Decimal("0.01"):
        cents = 100 * amount
        rounded = cents.quantize(Decimal(1).scaleb(cents.adjusted() - 1), ROUND_HALF_UP)
        if rounded < 1:
            return f"{sign}{rounded.normalize():f}¢"
    return f"{sign}${amount.quantize(Decimal('0.01'), ROUND_HALF_UP):,.2f}"


@register.filter
def usd_exact(nano: int | None) -> str:
    """Format nano-USD as dollars without rounding."""
    return NONE if nano is None else dollars(nano)


@register.filter
def usd_least(nano: int | None) -> str:
    """Format nano-USD as the least dollars that a person may enter, rounded up to three significant digits."""
    if nano is None:
        return NONE
    unit = 10 ** max(len(str(nano)) - 3, 0)
    return dollars(-(-nano // unit) * unit)


@register.filter
def usd_hour(nano_per_hour: int | None) -> str:
    return NONE if nano_per_hour is None else f"{usd(nano_per_hour)}/h"


@register.filter
def number(value: float | None) -> str:
    """Format a count with thousands separators."""
    return NONE if value is None else f"{value:,}"


@register.filter
def tokens(count: int | None) -> str:
    """Format a count briefly: 950, 8,192, and above that with three significant digits: 18.2K, 9.42M, 1.2B."""
    if count is None:
        return NONE
    if abs(count) < 10_000:
        return f"{count:,}"
    return _scaled(count, ("K", "M", "B", "T"))


@register.filter(name="bytes")
def bytes_(size: int | None) -> str:
    """Format a size in decimal units, as file managers and networks do: 61.4 MB."""
    if size is None:
        return NONE
    if abs(size) < 1_000:
        return f"{size} B"
    return _scaled(size, (" KB", " MB", " GB", " TB"))


@register.filter
def memory(size: int | None) -> str:
    """Format device memory in binary gigabytes, as drivers count it: 44.3 GiB, 80 GiB."""
    if size is None:
        return NONE
    gib = size / GIB
    return f"{gib:.2f} GiB" if 0 < gib < 1 else f"{gib:.1f}".removesuffix(".0") + " GiB"


@register.filter
def method_name(method: str) -> str:
    return _METHODS.get(method, method)


@register.filter
def role_name(role: str) -> str:
    """Return a member's role in the reader's language."""
    return gettext(role) if role in _ROLES else role


@register.filter
def lines(items: Iterable[object]) -> str:
    """Return one item per line."""
    return "\n".join(map(str, items))


@register.filter
def ticks(text: str) -> SafeString:
    """Render text in backticks as code, and escape the rest."""
    return SafeString(_TICKED.sub(r"<code>\1</code>", str(escape(text))))


@register.filter
def percent(share: float | None, decimals: int = 0) -> str:
    """Format a share of one: 0.314 is 31%. Only shares of exactly 0 and 1 are shown as 0% and 100%."""
    if share is None:
        return NONE
    step = 10**-decimals
    value = round(share * 100, decimals)
    if share > 0 and value == 0:
        return f"<{step:.{decimals}f}%"
    if share < 1 and value == 100:
        return f">{100 - step:.{decimals}f}%"
    return f"{value:.{decimals}f}%"


@register.filter
def signed_percent(share: float | None, decimals: int = 0) -> str:
    """Format a difference as a signed percentage: +3.1%, −12.0%, 0.0%."""
    if share is None:
        return NONE
    value = round(share * 100, decimals)
    sign = "+" if value > 0 else MINUS if value < 0 else ""
    return f"{sign}{abs(value):.{decimals}f}%"


@register.filter
def duration(seconds: float | None) -> str:
    """Format a measured duration in its two largest units: 9s, 3m 40s, 1h 24m, 2d 3h."""
    if seconds is None:
        return NONE
    total = max(0, round(seconds))
    if total < 60:
        return f"{seconds:.1f}s" if 0 < seconds < 10 and seconds != int(seconds) else f"{total}s"
    if total < 3_600:
        return f"{total // 60}m {total % 60:02d}s"
    if total < 86_400:
        return f"{total // 3_600}h {total % 3_600 // 60:02d}m"
    return f"{total // 86_400}d {total % 86_400 // 3_600}h"


@register.filter
def milliseconds(count: int | None) -> str:
    """Format a latency: 85 ms, 1.24 s, 2m 05s."""
    if count is None:
        return NONE
    if count < 1_000:
        return f"{count} ms"
    return f"{count / 1_000:.3g} s" if count < 59_950 else duration(count / 1_000)


@register.filter
def about(seconds: float | None) -> str:
    """Format an estimated duration no more precisely than it is known: under 1 min, 50 min, 1h 24m, 3d 4h."""
    if seconds is None:
        return NONE
    if seconds < 60:
        return gettext("under 1 min")
    if round(seconds / 60) < 60:
        return f"{round(seconds / 60)} min"
    return duration(round(seconds / 60) * 60)


def ago(moment: datetime.datetime | None) -> str:
    """Format how long ago a moment was, or how far ahead it lies."""
    if moment is None:
        return gettext("never")
    seconds = (timezone.now() - moment).total_seconds()
    span = _span_in_words(abs(seconds))
    if span is None:
        return gettext("just now")
    return gettext("%(span)s ago") % {"span": span} if seconds > 0 else gettext("in %(span)s") % {"span": span}


@register.simple_tag
def moment(value: datetime.datetime | None, style: str = "ago") -> SafeString | str:
    """Render a <time>: `ago`, `date`, `time` or `datetime`, in the zone that the reader chose, UTC on hover.

    Without a choice, app.js rewrites it in the zone of the reader's browser.
    """
    if value is None:
        return gettext("never") if style == "ago" else NONE
    utc = value.astimezone(datetime.UTC)
    zone = timezone.get_current_timezone()
    text = ago(value) if style == "ago" else date_format(value.astimezone(zone), str(_FORMATS[style]))
    is_chosen = zone is not timezone.get_default_timezone()
    return format_html(
        '<time datetime="{}"{} title="{} UTC">{}</time>',
        utc.isoformat(timespec="seconds"),
        "" if is_chosen else format_html(' data-time="{}"', style),
        f"{utc:%Y-%m-%d %H:%M:%S}",
        text,
    )


@register.simple_tag
@lru_cache(maxsize=1024, typed=True)  # typed: safe text and other text that reads the same differ
def icon(name: str, size: str = "", label: str = "", tone: str = "") -> SafeString:
    """Draw an icon of the sprite. Without a label, screen readers skip it. A page draws the same dozens each time."""
    classes = join_class("i", size and f"i-{size}", tone)
    named = format_html('role="img" aria-label="{}"', label) if label else _UNNAMED
    return format_html(_ICON, classes, named, _sprite(), name)


@cache
def _sprite() -> str:
    return static("icons.svg")


@register.simple_tag
def brand() -> str:
    """Return the name of this service, as its operator calls it."""
    return settings.BRAND_NAME


@register.simple_tag
def has_brand(part: str) -> bool:
    """Return whether the operator has set a `hue` or a `logo`."""
    return getattr(settings, f"BRAND_{part.upper()}") is not None


@register.simple_tag
def support_email() -> str:
    """Return the address that people write to for help; return "" if there is none."""
    return settings.SUPPORT_EMAIL


@register.filter
def undo_form(tags: str) -> dict[str, object]:
    """Return the address and fields of the *Undo* button of a message; {} if it has none."""
    found: dict[str, object] = json.loads(tags) if tags.startswith("{") else {}
    return found


def join_class(*classes: str) -> str:
    """Join the non-empty class names."""
    return " ".join(name for name in classes if name)


@register.filter
def initials(name: str) -> str:
    """Return up to two initials of a person's name or address."""
    words = [word for word in name.split("@")[0].replace(".", " ").replace("_", " ").split() if word[0].isalnum()]
    return "".join(word[0] for word in (words[:1] + words[1:][-1:])).upper() or "?"


@register.filter
def control_kind(field: BoundField) -> str:
    """Return the layout of a field: `check`, `choices` or `input`."""
    widget = field.field.widget
    if isinstance(widget, CheckboxInput):
        return "check"
    return "choices" if isinstance(widget, RadioSelect | CheckboxSelectMultiple) else "input"


@register.simple_tag
def control(field: BoundField, **attrs: str | bool | None) -> SafeString:
    """Render a field's widget with the class of its kind, or the given `class`; `data_x` becomes `data-x`."""
    widget = field.field.widget
    own = {name.replace("_", "-"): value for name, value in attrs.items() if value not in (None, "", False)}
    classes = join_class(str(own.pop("class", "")) or _control_class(widget), widget.attrs.get("class", ""))
    if widget.attrs.get("rows") == DJANGO_TEXTAREA_ROWS:
        own["rows"] = "4"
    return field.as_widget(attrs=own | {"class": classes})


def _control_class(widget: Widget) -> str:
    match widget:
        case CheckboxInput():
            return "check"
        case RadioSelect() | CheckboxSelectMultiple():
            return ""
        case Textarea() | Select() | FileInput():
            return "input"
        case _:
            return "input num" if getattr(widget, "input_type", "") == "number" else "input"


_FORMATS = {"date": later("j M Y"), "time": "H:i T", "datetime": later("j M Y, H:i T")}


def _scaled(value: int, units: tuple[str, ...]) -> str:
    """Format a value in the largest fitting unit with three significant digits, without trailing zeros."""
    scaled, power = value / 1_000, 0
    while abs(scaled) >= 999.5 and power < len(units) - 1:
        scaled, power = scaled / 1_000, power + 1
    decimals = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    text = f"{scaled:.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if decimals else text) + units[power]


def _span_in_words(seconds: float) -> str | None:
    if seconds < 45:
        return None
    for size, limit, unit in ((60, 60, "min"), (3_600, 24, "h"), (86_400, 30, "d"), (2_629_800, 12, "mo")):
        if round(seconds / size) < limit:
            return f"{max(1, round(seconds / size))} {unit}"
    return f"{max(1, round(seconds / 31_557_600))} y"
