"""Charts that templates draw: those in every row of a table, where a component each would take most of a page's time,
and those of pages that are not of this package.
"""

from collections.abc import Sequence
from html import escape

from django import template
from django.utils.safestring import SafeString
from django.utils.translation import gettext

from apps.interfaces.web.charts import day_charts, histograms
from apps.interfaces.web.charts.memory_charts import MemoryBar

register = template.Library()


@register.simple_tag
def memory_bar(bar: MemoryBar, size: str = "", label: str = "", unit: str = "GiB") -> SafeString:
    """Draw the memory a job needs of one card. `label` replaces the sentence that describes it."""
    capacity = f"{bar.capacity:.1f}".removesuffix(".0")
    does_not_fit = "" if bar.fits else gettext(", does not fit")
    said = escape(label or f"{bar.need:.1f} of {capacity} {unit}{does_not_fit}")
    names = escape(" ".join(name for name in ("vbar", size, "" if bar.fits else "over") if name))
    segments = "".join(
        f'<rect class="d{part.tone}" x="{part.x}" width="{part.width}" height="8">'
        f"<title>{escape(f'{part.label} {part.value:.1f} {unit}')}</title></rect>"
        for part in bar.segments
    )
    return SafeString(
        f'<svg class="{names}" role="img" aria-label="{said}" preserveAspectRatio="none" viewBox="0 0 100 8">'
        f"{segments}</svg>"
    )


@register.simple_tag
def stacked_days(days: Sequence[tuple[str, dict[str, int]]], *, is_money: bool = True) -> day_charts.Days:
    """Return the chart of amounts, or of counts, by day or hour; each day has the same series."""
    return day_charts.stacked_days(days, series=list(days[0][1]), is_money=is_money)


@register.simple_tag
def sparkline(values: Sequence[float]) -> histograms.Sparkline:
    """Return the line of a series of values, from zero up."""
    return histograms.sparkline(values, low=0)
