"""The tabs of a job's page beside its overview: log, events, dataset and checkpoints, each with its own address."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

from django.db.models import QuerySet
from django.http import HttpResponseBase
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.text import Truncator
from django.utils.translation import gettext
from django.views.decorators.http import require_safe

from apps.accounts.roles import Permission
from apps.contracts.chat.rows import ChatRow, PreferenceRow, TextRow
from apps.core.database.search import with_words
from apps.core.messages.translation import later
from apps.core.objects.downloads import stream_download
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.queries import RowPreview, list_token_counts, list_versions, read_rows
from apps.finetuning import queries
from apps.finetuning.models import FineTuningJob, JobEvent
from apps.finetuning.recipes.checkpoint_names import may_answer
from apps.finetuning.recipes.stored_requests import StartFrom, stored_request
from apps.finetuning.results.tensorboard import event_file, file_name, read_points
from apps.interfaces.web.shell.access import OrganizationRequest, may_write, organization_view

LABELS = {
    "": later("Overview"),
    "samples": later("Samples"),
    "log": later("Log"),
    "events": later("Events"),
    "dataset": later("Dataset"),
    "checkpoints": later("Checkpoints"),
}
_LEVELS = (
    ("", later("All levels")),
    ("info", later("Information")),
    ("warn", later("Warnings")),
    ("error", later("Errors")),
)
_ON_A_PAGE, _DOWNLOADED_LINES = 200, 10_000
_MAX_WORDS = 6
_FIRST_ROWS, _FIRST_TURNS = 3, 12
_SHOWN_CHARACTERS = 600  # of a message of a row
_UNSHOWN = ("histogram", "starts", "cuts")  # of a token count


@dataclass(frozen=True)
class EventPage:
    """One page of a job's events, oldest first, with the addresses of the pages before and after it."""

    events: list[JobEvent]
    older: str
    newer: str

    def shown(self) -> list[dict[str, object]]:
        """Return the events in the form that the component expects."""
        return [{"level": event.level, "message": event.message, "at": event.created_at} for event in self.events]


@dataclass(frozen=True)
class TrainingFile:
    """A file of the job, with its tokens and first rows. A deleted file has neither."""

    role: str
    version: DatasetVersion
    count: TokenCount | None
    rows: list[tuple[int, list[tuple[str, str]]]]


def chosen_tab(request: OrganizationRequest) -> str:
    """Return the tab that the address names, or else the overview."""
    tab = request.GET.get("tab", "")
    return tab if tab in LABELS else ""


def tab_links(job: FineTuningJob, chosen: str) -> list[dict[str, object]]:
    return [
        {"label": label, "url": address_of(job, {"tab": tab}), "current": tab == chosen}
        for tab, label in LABELS.items()
    ]


def context_of(request: OrganizationRequest, job: FineTuningJob, tab: str) -> dict[str, object]:
    """Return the context of a tab other than the overview."""
    makers: dict[str, Callable[[OrganizationRequest, FineTuningJob], dict[str, object]]] = {
        "samples": _samples,
        "log": _log,
        "events": _events,
        "dataset": _dataset,
        "checkpoints": _checkpoints,
    }
    return makers[tab](request, job)


def address_of(job: FineTuningJob, asked: dict[str, str], *, of: str = "web:job_detail") -> str:
    query = urlencode({name: value for name, value in asked.items() if value})
    return reverse(of, args=[job.pk]) + (f"?{query}" if query else "")


def sequence_of(text: str) -> int:
    """Return the number of an event that an address or a browser names; return 0 for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


@require_safe
@organization_view(Permission.VIEW)
def download_log(request: OrganizationRequest, job_id: str) -> HttpResponseBase:
    """Send the last log lines that the address asks for as text, at most `_DOWNLOADED_LINES`."""
    job = queries.get_job(organization=request.organization, id=job_id)
    newest_first = _lines(job, _asked_of_log(request)).order_by("-sequence")[:_DOWNLOADED_LINES]
    lines = [
        f"{line.created_at.isoformat(timespec='seconds')} {line.level.upper():5} {' '.join(line.message.split())}\n"
        for line in reversed(newest_first)
    ]
    body = iter(["".join(lines).encode()])
    return stream_download(request, body, filename=f"{job.pk}.log", content_type="text/plain; charset=utf-8")


@require_safe
@organization_view(Permission.VIEW)
def download_tensorboard(request: OrganizationRequest, job_id: str) -> HttpResponseBase:
    """Send the job's metrics as a TensorBoard event file."""
    job = queries.get_job(organization=request.organization, id=job_id)
    records = event_file(read_points(job=job), began_at=job.created_at.timestamp())
    return stream_download(request, records, filename=file_name(job), content_type="application/octet-stream")


# --- What each tab shows ----------------------------------------------------------------------------------------


def _samples(request: OrganizationRequest, job: FineTuningJob) -> dict[str, object]:
    by_step: dict[int, list[dict[str, str]]] = {
        event.data["step"]: event.data["samples"] for event in queries.list_samples(job=job).order_by("sequence")
    }
    before = by_step.pop(0, [])
    steps = sorted(by_step, reverse=True)
    asked = sequence_of(request.GET.get("step", ""))
    shown = asked if asked in by_step else max(steps, default=0)
    answers = zip_longest(before, by_step.get(shown, []))
    return {
        "pairs": [(base or tuned, base, tuned) for base, tuned in answers],
        "step": shown,
        "steps": [(str(step), gettext("Step %(step)s") % {"step": f"{step:,}"}) for step in steps],
        "is_base": stored_request(job).start_from == StartFrom(),
    }


def _log(request: OrganizationRequest, job: FineTuningJob) -> dict[str, object]:
    asked = _asked_of_log(request)
    page = _page(request, job, _lines(job, asked), {"tab": "log"} | asked)
    return {
        "lines": page.events,
        "older": page.older,
        "newer": page.newer,
        "asked": asked,
        "levels": _LEVELS,
        "download_url": address_of(job, asked, of="web:job_log"),
    }


def _asked_of_log(request: OrganizationRequest) -> dict[str, str]:
    level = request.GET.get("level", "")
    return {"level": level if level in dict(_LEVELS) else "", "q": request.GET.get("q", "").strip()[:80]}


def _lines(job: FineTuningJob, asked: dict[str, str]) -> QuerySet[JobEvent]:
    lines = with_words(queries.list_log_lines(job=job), asked["q"].split()[:_MAX_WORDS], ("message",))
    return lines.filter(level=asked["level"]) if asked["level"] else lines


def _events(request: OrganizationRequest, job: FineTuningJob) -> dict[str, object]:
    page = _page(request, job, queries.list_news(job=job), {"tab": "events"})
    return {"events": page.shown()[::-1], "older": page.older, "newer": page.newer}


def _page(
    request: OrganizationRequest, job: FineTuningJob, events: QuerySet[JobEvent], asked: dict[str, str]
) -> EventPage:
    """Return the page before or after the event that the address names, or else the newest page."""
    before, after = (sequence_of(request.GET.get(name, "")) for name in ("before", "after"))
    found = list(events.filter(sequence__gt=after).order_by("sequence")[: _ON_A_PAGE + 1]) if after else []
    if found:
        has_older, has_newer = True, len(found) > _ON_A_PAGE
        found = found[:_ON_A_PAGE]
    else:
        newest_first = (events.filter(sequence__lt=before) if before else events).order_by("-sequence")
        found = list(newest_first[: _ON_A_PAGE + 1])
        has_older, has_newer = len(found) > _ON_A_PAGE, bool(before)
        found = found[:_ON_A_PAGE][::-1]
    return EventPage(
        events=found,
        older=address_of(job, asked | {"before": str(found[0].sequence)}) if found and has_older else "",
        newer=address_of(job, asked | ({"after": str(found[-1].sequence)} if found else {})) if has_newer else "",
    )


def _dataset(request: OrganizationRequest, job: FineTuningJob) -> dict[str, object]:
    versions = {gettext("Training file"): job.training_file, gettext("Validation file"): job.validation_file}
    named = [version.pk for version in versions.values() if version is not None]
    seen = set(list_versions(organization=request.organization).filter(pk__in=named).values_list("pk", flat=True))
    there = {role: version for role, version in versions.items() if version is not None}
    counts = {
        count.version_id: count
        for count in list_token_counts(versions=there.values(), base_model=job.base_model).defer(*_UNSHOWN)
    }
    share = job.hyperparameters.get("validation_share") or 0.0
    files = []
    for role, version in there.items():
        is_shown = version.pk in seen and version.status == DatasetVersionStatus.READY
        previews = read_rows(version=version, limit=_FIRST_ROWS) if is_shown else []
        rows = [(preview.line, _turns(preview)) for preview in previews]
        files.append(TrainingFile(role, version, counts.get(version.pk), rows))
    return {
        "files": files,
        "held_out": share if job.validation_file is None else 0.0,
    }


def _turns(preview: RowPreview) -> list[tuple[str, str]]:
    """Return the (role, text) pairs of a row, each text cut for display."""
    match preview.row:
        case ChatRow(messages=messages):
            turns = [(str(each.role), each.content) for each in messages]
        case PreferenceRow() as row:
            turns = [(str(each.role), each.content) for each in row.prompt]
            turns += [(gettext("preferred"), each.content) for each in row.preferred]
            turns += [(gettext("not preferred"), each.content) for each in row.non_preferred]
        case TextRow(text=text):
            turns = [(gettext("text"), text)]
        case None:
            turns = [(gettext("line"), preview.raw)]
    return [(role, Truncator(text).chars(_SHOWN_CHARACTERS)) for role, text in turns[:_FIRST_TURNS]]


def _checkpoints(request: OrganizationRequest, job: FineTuningJob) -> dict[str, object]:
    checkpoints = list(queries.list_checkpoints(job=job))
    may_try = may_write(request, Permission.ADAPTER_WRITE, job.project_id) and may_answer(job)
    return {
        "checkpoints": checkpoints,
        "best_checkpoint": queries.best_of(checkpoints),
        "may_try_checkpoints": may_try,
    }
