"""The page of one file: its figures, its rows as a model sees them, and what to check before training."""

from dataclasses import dataclass, replace

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.views.decorators.http import require_http_methods

from apps.accounts.members.visibility import visible
from apps.accounts.queries import name_of_actor
from apps.accounts.roles import Permission, has_permission
from apps.contracts.chat import RowKind, TrainOn
from apps.contracts.splits.held_rows import Repeats
from apps.core.messages.translation import later, translated
from apps.datasets import queries
from apps.datasets.inspection import comparisons
from apps.datasets.inspection.inspector import FindingCode
from apps.datasets.lifecycle import UNVALIDATED, DatasetVersionStatus
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.problems import MIN_ROWS, LineError
from apps.datasets.rows import kind_of
from apps.datasets.validation.repair import COPY, EDIT, HELD
from apps.interfaces.web.charts.histograms import histogram
from apps.interfaces.web.datasets.address import Address, chosen_model, find_compared, read_address
from apps.interfaces.web.datasets.preparation import is_ready, is_uncounted, prepare
from apps.interfaces.web.datasets.price import least_nano, training_draft
from apps.interfaces.web.datasets.viewer import (
    HELD_OUT,
    LOST,
    NEARLY_SHARED,
    OVER,
    SHARED,
    RowContext,
    cut_at,
    look,
    viewer_context,
)
from apps.interfaces.web.shell.access import OrganizationRequest, may_write, organization_view

_MAX_JOBS, _MAX_OVERLAPS, _MAX_VERSIONS = 50, 6, 100
_WHAT_ROWS = {
    "chat": (
        later("%(rows)s conversation rows, at least %(least)s needed"),
        later("Every row ends with an answer to learn from"),
    ),
    "preference": (
        later("%(rows)s preference rows, at least %(least)s needed"),
        later("Every row has two different answers"),
    ),
    "text": (later("%(rows)s text rows, at least %(least)s needed"), later("Every row has text to learn from")),
}
_FOUND = {
    FindingCode.EXACT_COPY: ngettext_lazy(
        "%(rows)s row repeats an earlier row", "%(rows)s rows repeat an earlier row", "number"
    ),
    FindingCode.NEAR_COPY: ngettext_lazy(
        "%(rows)s row is nearly the same as an earlier one",
        "%(rows)s rows are nearly the same as an earlier one",
        "number",
    ),
    FindingCode.CONFLICTING_ANSWERS: ngettext_lazy(
        "%(rows)s row contradicts an earlier row", "%(rows)s rows contradict an earlier row", "number"
    ),
    FindingCode.EMPTY_TARGET: ngettext_lazy("%(rows)s row trains nothing", "%(rows)s rows train nothing", "number"),
    FindingCode.EMAIL: ngettext_lazy(
        "%(rows)s row may contain an email address", "%(rows)s rows may contain email addresses", "number"
    ),
    FindingCode.PHONE: ngettext_lazy(
        "%(rows)s row may contain a phone number", "%(rows)s rows may contain phone numbers", "number"
    ),
    FindingCode.CARD: ngettext_lazy(
        "%(rows)s row may contain a card number", "%(rows)s rows may contain card numbers", "number"
    ),
    FindingCode.IBAN: ngettext_lazy("%(rows)s row may contain an IBAN", "%(rows)s rows may contain IBANs", "number"),
    FindingCode.KEY: ngettext_lazy(
        "%(rows)s row may contain a secret key", "%(rows)s rows may contain secret keys", "number"
    ),
}


@dataclass(frozen=True)
class FileCheck:
    """One finding. `level` is ok, info, warn or bad; `url` is the page that shows it."""

    level: str
    text: str
    fix: str = ""
    url: str = ""


@require_http_methods(["GET", "HEAD", "POST"])
@organization_view(Permission.VIEW, is_of_any_project=True)
def detail(request: OrganizationRequest, file_id: str) -> HttpResponse:
    """Show a file. htmx gets the part it asks for.

    The parts are the row viewer, the button's price, or the whole dataset while a task is running. A POST computes what
    the page lacks, or has a task do it.
    """
    version = queries.get_version(organization=request.organization, id=file_id)
    model = chosen_model(request)
    count = queries.find_token_count(version=version, base_model=model) if model else None
    address = read_address(request, version, model, count)
    if request.method == "POST":
        prepare(version=version, base_model=model, other=find_compared(address), with_inspection=True)
        count = queries.find_token_count(version=version, base_model=model) if model else None
        address = read_address(request, version, model, count)
    part = request.headers.get("HX-Target", "") if request.htmx else ""
    if part.endswith("#least-price"):
        price_nano = least_nano(request.organization, training_draft(address, model))
        return _part(request, "price", {"least_nano": price_nano})
    looked = look(version, model, address, count)
    context = viewer_context(address, looked, is_pending=version.status in UNVALIDATED)
    context["may_write"] = may_write(request, Permission.DATASET_WRITE, version.dataset.project_id)
    if part.endswith("#viewer"):
        return _part(request, "viewer", context)
    context |= _summary(address, looked) | {
        "uploader": name_of_actor(organization=request.organization, actor=version.created_by),
        "may_train": has_permission(request.membership.role, Permission.JOB_WRITE),
    }
    return _part(request, "dataset" if part else "", context)


def _part(request: HttpRequest, name: str, context: dict[str, object]) -> HttpResponse:
    """Render one part of the page, or all of it if the name is ""."""
    response = render(request, "datasets/detail.html" + (f"#{name}" if name else ""), context)
    patch_vary_headers(response, ["HX-Request", "HX-Target"])
    return response


def _summary(address: Address, looked: RowContext) -> dict[str, object]:
    version, count = address.version, looked.count
    is_pending = version.status in UNVALIDATED
    is_uninspected = version.status == DatasetVersionStatus.READY and looked.inspection is None
    is_counting = is_uncounted(version=version, base_model=looked.model, count=count)
    is_comparing = looked.repeats is None and is_ready(version, looked.compared)
    is_preparing = is_counting or is_uninspected or is_comparing
    refusal = None
    if looked.model and not count and not is_counting:
        refusal = queries.find_refusal(version=version, base_model=looked.model)
    checks = _checks(address, looked, refusal)
    cut = cut_at(count, address.limit)
    siblings = list(queries.list_siblings(version=version)[:_MAX_VERSIONS])
    # The newest version was made from one that still exists, so that its file can be restored.
    is_newest = siblings[:1] == [version] and not is_pending
    is_undoable = is_newest and version.repair not in ("", COPY) and version.derived_from in siblings
    trained = 0
    if count is not None:
        trained = count.tokens if address.train_on is TrainOn.ALL else count.trained_tokens
    is_text = kind_of(version) is RowKind.TEXT  # no row is cut
    return {
        "count": count,
        "cut": cut,
        "limit": address.limit,
        "is_pending": is_pending,
        "is_live": is_pending or is_preparing,
        "is_preparing": is_preparing,
        "is_counting": is_counting,
        "is_inspecting": is_uninspected or is_comparing,
        "trained_tokens": trained,
        "trains_inputs": address.train_on is TrainOn.ALL,
        "has_inputs": kind_of(version) is RowKind.CHAT,
        "is_text": is_text,
        "trained_share": trained / count.tokens if count and count.tokens else None,
        "others": _others(version),
        "plot": histogram(count.histogram, limit=None if is_text else address.limit) if count else None,
        "checks": checks,
        "passed_count": sum(check.level == "ok" for check in checks),
        "hidden_error_count": version.error_count - len(version.errors),
        "held_count": sum(looked.held) if looked.held is not None else None,
        "kept_count": looked.held.count(False) if looked.held is not None else None,
        "wizard_url": training_draft(address, looked.model).url("model"),
        "held_url": address.url(find=HELD_OUT, first=1, line=1),
        "siblings": siblings,
        "origin": _origin(version),
        "is_undoable": is_undoable,
        "jobs": visible(version.jobs.all()).select_related("base_model").order_by("-created_at")[:10],
    }


def _origin(version: DatasetVersion) -> tuple[str, str] | None:
    """Return the text before and after the link to the version that this one was made from."""
    source, layout = version.derived_from, version.layout
    if source is None or not version.repair:
        return None
    if version.repair == COPY:
        return gettext("A copy of"), ""
    if version.repair == EDIT:
        return gettext("Made from"), (
            gettext(", with line %(line)s deleted") if layout.dropped else gettext(", with line %(line)s changed")
        ) % {"line": f"{layout.edited_line:,}"}
    if layout.split:
        of = (
            gettext("The validation rows of %(name)s,")
            if version.repair == HELD
            else gettext("The training rows of %(name)s,")
        )
        return of % {"name": source.dataset.name}, gettext(", split with seed %(seed)s") % {"seed": layout.split.seed}
    return gettext("Repaired from"), gettext(": %(repaired)s rows repaired, %(dropped)s left out") % {
        "repaired": f"{layout.repaired:,}",
        "dropped": f"{layout.dropped:,}",
    }


def _others(version: DatasetVersion) -> list[tuple[str, str]]:
    """Return the files that this one can be compared with."""
    versions = queries.list_versions(organization=version.organization_id).defer("errors", "line_offsets")
    return [
        (
            other.pk,
            gettext("Validation: %(name)s, %(filename)s") % {"name": other.dataset.name, "filename": other.filename},
        )
        for other in versions.filter(status=DatasetVersionStatus.READY).exclude(pk=version.pk)[:100]
    ]


def _checks(address: Address, looked: RowContext, refusal: LineError | None) -> list[FileCheck]:
    version = address.version
    if version.status == DatasetVersionStatus.INVALID:
        return [
            FileCheck(
                "bad",
                gettext("Line %(line)s: %(message)s")
                % {"line": f"{error['line']:,}", "message": translated(error["message"])},
                error["fix"],
                address.at(error["line"]),
            )
            for error in version.errors
        ]
    if version.status != DatasetVersionStatus.READY:
        return []
    what, is_whole = _WHAT_ROWS[version.kind or "chat"]
    checks = [
        FileCheck(
            "ok",
            what % {"rows": f"{version.rows:,}", "least": MIN_ROWS},
        ),
        FileCheck("ok", is_whole),
    ]
    if refusal:
        text = gettext("Line %(line)s: %(message)s") % {
            "line": f"{refusal.line:,}",
            "message": translated(refusal.message),
        }
        checks.append(FileCheck("bad", text, refusal.fix, address.at(refusal.line)))
    if looked.count:
        checks += _length_checks(looked.count, address)
    return checks + _found(address, looked)


def _length_checks(count: TokenCount, address: Address) -> list[FileCheck]:
    limit = address.limit
    if count.longest_row_tokens <= limit:
        return [FileCheck("ok", gettext("Every row fits in %(limit)s tokens") % {"limit": f"{limit:,}"})]
    cut = cut_at(count, limit)
    if kind_of(address.version) is RowKind.TEXT:
        over = _rows(cut.over) if cut else gettext("Some rows")
        return [
            FileCheck(
                "ok",
                gettext("%(rows)s over %(limit)s tokens: trained in pieces, nothing is cut")
                % {"rows": over, "limit": f"{limit:,}"},
                "",
                _find(address, OVER),
            )
        ]
    if cut is None:
        return [
            FileCheck(
                "warn", gettext("Some rows are longer than %(limit)s tokens and will be cut") % {"limit": f"{limit:,}"}
            )
        ]
    lost = 0 if address.train_on is TrainOn.ALL else cut.untrained
    text = gettext("%(rows)s over %(limit)s tokens will be cut") % {"rows": _rows(cut.over), "limit": f"{limit:,}"}
    checks = [FileCheck("warn", text, "", _find(address, OVER))]
    if lost:
        text = ngettext(
            "%(rows)s row of these trains nothing and is left out",
            "%(rows)s rows of these train nothing and are left out",
            lost,
        ) % {"rows": f"{lost:,}"}
        checks.append(
            FileCheck(
                "warn", text, gettext("Raise the limit or shorten what comes before the answer."), _find(address, LOST)
            )
        )
    return checks


def _found(address: Address, looked: RowContext) -> list[FileCheck]:
    if looked.inspection is None:
        return []
    findings = {found["code"]: found for found in looked.inspection.findings}
    if FindingCode.NOT_INSPECTED in findings:
        text = gettext("The rows were not inspected")
        checks = [FileCheck("warn", text, gettext("That takes longer than the file's size allows. Split the file."))]
        return checks + _compared(address, looked) + _overlaps(address, looked)
    checks = []
    for code, sentence in _FOUND.items():
        if code in findings:
            rows = findings[code]["rows"]
            level = "info" if code.startswith("personal_") and code != FindingCode.KEY else "warn"
            checks.append(FileCheck(level, sentence % {"number": rows, "rows": f"{rows:,}"}, "", _find(address, code)))
    if not {FindingCode.EXACT_COPY, FindingCode.NEAR_COPY} & findings.keys():
        checks.append(FileCheck("ok", gettext("No row repeats another")))
    if not any(code.startswith("personal_") for code in findings):
        checks.append(FileCheck("ok", gettext("No email addresses, phone or card numbers, IBANs or keys found")))
    return checks + _compared(address, looked) + _overlaps(address, looked)


def _compared(address: Address, looked: RowContext) -> list[FileCheck]:
    """Return how many rows repeat the chosen validation file."""
    if looked.repeats is None:
        return []
    equal, near = looked.repeats.count(Repeats.A_ROW), looked.repeats.count(Repeats.NEARLY_A_ROW)
    if not equal and not near:
        return [FileCheck("ok", gettext("No row repeats the validation file"))]
    return _shared(equal, near, gettext("the validation file"), (_find(address, SHARED), _find(address, NEARLY_SHARED)))


def _shared(equal: int, near: int, file: str, urls: tuple[str, str] = ("", "")) -> list[FileCheck]:
    checks = []
    if equal:
        text = ngettext("%(rows)s row stands in %(file)s too", "%(rows)s rows stand in %(file)s too", equal) % {
            "rows": f"{equal:,}",
            "file": file,
        }
        checks.append(FileCheck("warn", text, gettext("They are not trained on."), urls[0]))
    if near:
        text = ngettext(
            "%(rows)s row nearly repeats one of %(file)s", "%(rows)s rows nearly repeat one of %(file)s", near
        ) % {"rows": f"{near:,}", "file": file}
        checks.append(FileCheck("warn", text, gettext("They are not trained on."), urls[1]))
    return checks


def _overlaps(address: Address, looked: RowContext) -> list[FileCheck]:
    """Compare the version with the validation files that jobs used beside it."""
    if looked.inspection is None:
        return []
    version, checks = address.version, list[FileCheck]()
    jobs = visible(visible(version.jobs.all()), project="validation_file__dataset__project")
    jobs = jobs.exclude(validation_file=None).exclude(validation_file=address.against or None)
    latest = jobs.select_related("validation_file").order_by("-created_at")[:_MAX_JOBS]
    used = {job.validation_file.pk: job.validation_file for job in latest if job.validation_file}
    for other in used.values():
        found = comparisons.find_comparison(version=version, other=other)
        if found and len(checks) < _MAX_OVERLAPS:
            checks += _shared(found.equal_rows, found.near_rows, other.filename, _shared_urls(address, other))
    return checks


def _shared_urls(address: Address, other: DatasetVersion) -> tuple[str, str]:
    """Return the addresses of the equal and the similar rows of both files; none for a deleted file."""
    if other.status == DatasetVersionStatus.DELETED:
        return "", ""
    looked = replace(address, against=other.pk)
    return _find(looked, SHARED), _find(looked, NEARLY_SHARED)


def _find(address: Address, code: str) -> str:
    return address.url(find=str(code), q="", first=1, line=1)


def _rows(count: int) -> str:
    return ngettext("%(rows)s row", "%(rows)s rows", count) % {"rows": f"{count:,}"}
