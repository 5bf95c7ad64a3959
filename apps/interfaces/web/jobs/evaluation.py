"""The report that compares base and tuned model, as tables for the job page and the adapter page."""

from django.utils.translation import gettext

from apps.adapters.models import AdapterVersion
from apps.contracts.evaluation import Comparison
from apps.core.messages.translation import later, translated
from apps.finetuning.queries import report_of
from apps.finetuning.results.provenance import label_of

_VERDICTS = {
    "better": (later("better"), "ok"),
    "worse": (later("worse"), "bad"),
    "level": (later("no difference"), ""),
}  # label and tone


def evaluation_of(version: AdapterVersion | None) -> dict[str, object] | None:
    """Return the report with its rows prepared for the page; return None without a report."""
    report = report_of(version) if version is not None else None
    if report is None:
        return None
    return {"report": report, "rows": [_row(found) for found in report.comparisons]}


def _row(found: Comparison) -> dict[str, object]:
    verdict, tone = _VERDICTS[found.verdict]
    values = ((gettext("Base"), found.base), (gettext("Tuned"), found.tuned), (gettext("Difference"), found.difference))
    return {
        "label": translated(label_of(found.name)),
        "verdict": verdict,
        "tone": tone,
        "values": [
            {"label": label, "value": interval.value, "low": interval.low, "high": interval.high}
            for label, interval in values
        ],
    }
