"""Every component in every state on one page, for developers and the browser tests."""

import datetime
import math
from types import SimpleNamespace

from django import forms
from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from apps.core.templatetags.statuses import STATUSES
from apps.interfaces.web.charts import day_charts, histograms, memory_charts, scatter_charts
from apps.interfaces.web.shell.access import person_view

PARTS = (
    ("Weights, bf16", 29.6),
    ("Activations", 9.1),
    ("Loss and logits", 1.9),
    ("Adapter, optimizer", 1.3),
    ("CUDA, fragments", 2.4),
)
CARDS = (
    ("h100", "H100 SXM", 80, 12_400, 2.69, 3_000, 1.88),
    ("b200", "B200", 180, 23_800, 5.49, 1_620, 2.18),
    ("h200", "H200", 141, 13_600, 3.49, 2_700, 2.25),
    ("a100", "A100 SXM", 80, 5_900, 1.49, 5_040, 2.08),
    ("l40s", "L40S", 48, 3_150, 1.10, 9_240, 2.81),
    ("l4", "L4", 24, 980, 0.55, 0, 0.0),
)
TOTAL_STEPS, DONE_STEPS, EVALUATE_EVERY = 2_163, 1_342, 120


class SampleForm(forms.Form):
    """One field of each kind."""

    name = forms.CharField(help_text="Shown in lists and in the adapter's name.")
    email = forms.EmailField(label="Work e-mail")
    base_model = forms.ChoiceField(choices=[("8b", "Qwen3-8B"), ("14b", "Qwen3-14B")])
    epochs = forms.IntegerField(initial=3, min_value=1, max_value=20)
    note = forms.CharField(widget=forms.Textarea, required=False, help_text="Only members of the organization see it.")
    role = forms.ChoiceField(
        choices=[("admin", "Admin"), ("member", "Member"), ("viewer", "Viewer")],
        widget=forms.RadioSelect,
        initial="member",
    )
    packing = forms.BooleanField(label="Pack short rows together", help_text="Fewer padded tokens, same loss.")
    checkpoints = forms.BooleanField(label="Keep every checkpoint", required=False)


@require_safe
@person_view
def show(request: HttpRequest) -> HttpResponse:
    """Render the style guide for developers and operators; raise 404 for anyone else."""
    _require_access(request)
    return render(request, "shell/styleguide/show.html", _forms() | _charts() | _domain() | _lists())


@require_safe
@person_view
def metrics(request: HttpRequest) -> JsonResponse:
    """Return the sample curve of the live chart."""
    _require_access(request)
    steps = list(range(4, DONE_STEPS + 1, 4))
    evaluated = {step: 0.80 + 0.95 * math.exp(-step / 130) + 0.27 * math.exp(-step / 640) for step in steps}
    return JsonResponse({
        "x": steps,
        "series": {
            "train_loss": [round(_loss(step), 4) for step in steps],
            "eval_loss": [round(evaluated[step], 4) if step % EVALUATE_EVERY == 0 else None for step in steps],
            "learning_rate": [2e-4 * 0.5 * (1 + math.cos(math.pi * step / TOTAL_STEPS)) for step in steps],
        },
        "total": TOTAL_STEPS, "epochs": [721, 1442], "checkpoints": [480, 720, 960, 1200], "best": 1200,
    })  # fmt: skip


def _require_access(request: HttpRequest) -> None:
    if not (settings.DEBUG or getattr(request.user, "is_operator", False)):
        raise Http404


def _loss(step: int) -> float:
    """Return a smooth curve with a ripple. It is not random, so that screenshots can be compared."""
    ripple = 0.03 * math.sin(step * 1.7) * math.cos(step * 0.31)
    return 0.742 + 1.05 * math.exp(-step / 120) + 0.30 * math.exp(-step / 700) + ripple


def _forms() -> dict[str, object]:
    return {
        "form": SampleForm(),
        "broken": SampleForm({"name": "", "email": "mira@", "base_model": "8b", "epochs": 90, "role": "owner"}),
        "models": [("8b", "Qwen3-8B"), ("14b", "Qwen3-14B")],
        "sorts": [("recommended", "Recommended"), ("cost", "Cost"), ("finish", "Finish")],
    }


def _charts() -> dict[str, object]:
    rows = [_card_row(*card) for card in CARDS]
    options = [
        scatter_charts.Option(
            key=key, label=name.replace(" SXM", ""), seconds=seconds, cost=cost, title=f"{name} ${cost:.2f}"
        )
        for key, name, _, _, _, seconds, cost in CARDS
        if seconds
    ]
    bounds = [(256 * (i + 1), round(4_000 * math.exp(-((i - 2) ** 2) / 9)) or (3 if i > 14 else 0)) for i in range(24)]
    week = [f"{day} Nov" for day in range(8, 22)]
    amounts = [
        {"Training": round((3 + 2.4 * math.sin(i)) * 1e9), "Inference": 10**8 * (12 + i), "Storage": 3 * 10**8}
        for i in range(len(week))
    ]
    return {
        "gpu_rows": rows,
        "bar": rows[0].bar,
        "tight_bar": rows[4].bar,
        "over_bar": rows[5].bar,
        "lines": memory_charts.memory_lines(PARTS, [24, 48, 80, 141, 180], chosen=80),
        "scatter": scatter_charts.scatter(options, chosen="h100", deadline_seconds=5_460),
        "histogram": histograms.histogram(bounds, limit=4_096),
        "spark": histograms.sparkline([96 + 2.5 * math.sin(i / 3) for i in range(60)], low=0, high=100),
        "days": day_charts.stacked_days(
            list(zip(week, amounts, strict=True)), series=["Training", "Inference", "Storage"]
        ),
    }


def _card_row(key: str, name: str, gb: int, rate: int, hourly: float, seconds: int, cost: float) -> SimpleNamespace:
    return SimpleNamespace(
        key=key, name=name, gb=gb, rate=rate, hourly=round(hourly * 1e9), seconds=seconds, cost=round(cost * 1e9),
        low=round(cost * 0.91e9), high=round(cost * 1.17e9), bar=memory_charts.memory_bar(PARTS, gb),
        late=seconds > 5_460, edge=4_800 < seconds <= 5_460,
    )  # fmt: skip


def _domain() -> dict[str, object]:
    phase, step = ("name", "state", "note", "percent", "long"), ("name", "state", "url")
    return {
        "phases": _rows(
            phase,
            [("Validate", "done", "9s", None, False), ("Queue", "done", "8m", None, False),
             ("Boot", "done", "3m 40s", None, False), ("Train", "now", "62%, 24m 10s", 62, True),
             ("Export", "", "", None, False), ("Ready", "", "", None, False)],
        ),
        "failed_phases": _rows(
            phase,
            [("Validate", "done", "9s", None, False), ("Queue", "done", "8m", None, False),
             ("Train", "failed", "step 480", None, True), ("Ready", "", "", None, False)],
        ),
        "waiting_phases": _rows(
            phase,
            [("Validate", "done", "9s", None, False), ("Queue", "now", "3rd in line", None, False),
             ("Train", "", "", None, True), ("Ready", "", "", None, False)],
        ),
        "steps": _rows(
            step,
            [("Dataset", "done", "#d"), ("Model", "done", "#m"), ("Method", "done", "#t"), ("Compute", "now", ""),
             ("Review", "", "")],
        ),
        "recipe": _rows(
            ("name", "value", "detail", "url"),
            [("Dataset", "support-tickets-v3", "18,240 rows, 9.42M tokens", "#d"),
             ("Base model", "Qwen3-14B", "Apache-2.0, 14.8B params", "#m"),
             ("Method", "LoRA, bf16", "r 16, 64.2M trainable", "#t"), ("Compute", "", "", "")],
        ),
        "samples": _rows(
            ("key", "label", "code"),
            [("curl", "curl", "curl https://anneal.example/v1/models"), ("python", "Python", "client.models.list()")],
        ),
    }  # fmt: skip


def _lists() -> dict[str, object]:
    at = datetime.datetime(2026, 11, 20, 16, 31, 5, tzinfo=datetime.UTC)
    return {
        "statuses": list(STATUSES),
        "at": at,
        "events": _rows(
            ("level", "message", "detail", "at"),
            [("info", "Step 1,340: training loss 0.779", "", at), ("warn", "The worker missed two heartbeats", "", at),
             ("error", "CUDA out of memory", "Batch 4 to 2 fits; retry from step 480 for $0.61.", at)],
        ),
        "pages": [
            {"label": "Overview", "url": "#o", "current": True},
            {"label": "Runs", "url": "#r", "count": 3, "current": False},
        ],
        "panels": [{"label": "Samples", "panel": "p-samples", "count": 12}, {"label": "Logs", "panel": "p-logs"}],
        "dataset_rows": _rows(
            ("number", "text", "tokens", "turns", "flag"),
            [("4,115", "Invoice shows two seats we removed", 322, 3, ""),
             ("4,116", "Export to CSV drops the last column", 518, 5, ""),
             ("4,117", "SSO broke after the domain change", 593, 5, ""),
             ("4,119", "Please delete my workspace and data", 447, 3, "e-mail"),
             ("4,120", "Full thread of the October outage", 6_311, 18, "cut")],
        ),
    }  # fmt: skip


def _rows(names: tuple[str, ...], values: list[tuple[object, ...]]) -> list[SimpleNamespace]:
    return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in values]
