"""One fine-tuning job with its live chart, and the actions on it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from django.contrib import messages
from django.http import HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.cache import patch_vary_headers
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.views.decorators.http import require_POST, require_safe

from apps.accounts.models import User
from apps.accounts.queries import list_keys
from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.http.forms import domain_errors_shown
from apps.core.money import NANO_PER_CENT, usd_decimal
from apps.core.templatetags.ui import number, status, usd
from apps.finetuning import queries
from apps.finetuning.jobs import control
from apps.finetuning.jobs.explanations import explain
from apps.finetuning.jobs.moves import list_moves, move_job
from apps.finetuning.jobs.progress import JobProgress, get_progress
from apps.finetuning.jobs.retraining.plans import is_repeatable
from apps.finetuning.jobs.retries import retry_job
from apps.finetuning.jobs.waits import explain_wait
from apps.finetuning.lifecycle import JOB_TERMINAL, JobStatus
from apps.finetuning.models import FineTuningJob
from apps.finetuning.runs import attempts
from apps.finetuning.usage import charges
from apps.interfaces.web.jobs import tabs
from apps.interfaces.web.jobs.curves import curves_of, with_number
from apps.interfaces.web.jobs.overview import attempts_of, machine_of, overview_of
from apps.interfaces.web.jobs.phases import phases_of
from apps.interfaces.web.jobs.recipe import method_words, recipe_samples
from apps.interfaces.web.shell.access import OrganizationRequest, may_write, organization_view
from apps.interfaces.web.shell.live import Watcher, follow_job
from apps.interfaces.web.wizard.compute_forms import CapForm
from apps.interfaces.web.wizard.draft import Draft, start_of
from apps.serving.queries import serving_states


@require_safe
@organization_view(Permission.VIEW, is_of_any_project=True)
def detail(request: OrganizationRequest, job_id: str) -> HttpResponse:
    """Show one job with the tab of the address. While it is live, htmx reloads its state and the tab's new content."""
    job = queries.get_job(organization=request.organization, id=job_id)
    tab = tabs.chosen_tab(request)
    target = request.headers.get("HX-Target", "")
    if request.htmx and target.endswith("#tab-news"):
        news = tabs.context_of(request, job, tab) if tab else attempts_of(job)
        context = {"job": job, **_rights(request, job), **news}
        response = render(request, f"jobs/_{tab or 'overview'}.html#news", context)
    elif request.htmx and target.endswith("#tab-machine"):
        machine = machine_of(job, speed=get_progress(job=job, now=db_now()).tokens_per_second)
        context = {"job": job, **_rights(request, job), **attempts_of(job), **machine}
        response = render(request, "jobs/_machine.html", context)
    elif request.htmx:
        response = render(request, "jobs/detail.html#state", _state(request, job))
    else:
        state = _state(request, job)
        speed = state["progress"].tokens_per_second
        context = {
            **state,
            **(tabs.context_of(request, job, tab) if tab else overview_of(job, speed=speed)),
            "tab": tab or "overview",
            "tabs": tabs.tab_links(job, tab),
            "samples": recipe_samples(job, model=start_of(job)),
        }
        response = render(request, "jobs/detail.html", context)
    patch_vary_headers(response, ["HX-Request", "HX-Target"])
    if request.htmx and job.status in JOB_TERMINAL:
        response.headers["HX-Refresh"] = "true"  # its report, certificate and files appear in many places on the page
    return response


@require_safe
@organization_view(Permission.VIEW, is_of_any_project=True)
def chart(request: OrganizationRequest, job_id: str) -> JsonResponse:
    """Return the curves so far: {"x", "series", "total", "epochs", "checkpoints", "best"}."""
    job = queries.get_job(organization=request.organization, id=job_id)
    return JsonResponse(curves_of(job))


def stream(request: OrganizationRequest, job_id: str) -> HttpResponseBase:
    """Stream the job's server-sent events, starting after Last-Event-ID or ?after."""
    opened = _open_stream(request, job_id=job_id)
    if opened.status_code != 204:
        return opened
    after = request.headers.get("Last-Event-ID") or request.GET.get("after", "0")
    response = StreamingHttpResponse(
        follow_job(watcher=_watcher(request), job_id=job_id, after=tabs.sequence_of(after)),
        content_type="text/event-stream",
    )
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Accel-Buffering"] = "no"
    return response


@require_safe
@organization_view(Permission.VIEW, is_of_any_project=True)
def _open_stream(request: OrganizationRequest, job_id: str) -> HttpResponse:
    """Authorise in a separate transaction, so that a watcher holds no connection."""
    queries.get_job(organization=request.organization, id=job_id, related=("price_rule",))
    _watcher(request).require_room()
    return HttpResponse(status=204)


def _watcher(request: OrganizationRequest) -> Watcher:
    assert request.session.session_key
    return Watcher(request.user, request.session.session_key, request.organization.pk)


stream.access = _open_stream.access  # type: ignore[attr-defined]


@require_POST
@organization_view(Permission.JOB_WRITE)
def cancel(request: OrganizationRequest, job_id: str) -> HttpResponse:
    """Cancel a job that has not started. For another one, ask for its name first, as for several jobs."""
    if queries.get_job(organization=request.organization, id=job_id).started_at is not None:
        return redirect(cancel_url(job_id))
    return _act(request, job_id, control.request_cancellation, gettext("The job is being cancelled."))


@require_POST
@organization_view(Permission.JOB_WRITE)
def pause(request: OrganizationRequest, job_id: str) -> HttpResponse:
    return _act(request, job_id, control.request_pause, gettext("Saving a checkpoint, then pausing."))


@require_POST
@organization_view(Permission.JOB_WRITE)
def resume(request: OrganizationRequest, job_id: str) -> HttpResponse:
    """Queue a paused job again. `cap` sets a new spend cap; it is required if the old one stopped the job."""
    form = CapForm(request.POST)
    if not form.is_valid():
        messages.error(request, gettext("The new cap is an amount in dollars, such as 2.50."))
        return redirect("web:job_detail", job_id=job_id)
    act = partial(control.resume, spend_cap_nano=form.cap_nano)
    return _act(request, job_id, act, gettext("The job is queued again."))


@require_POST
@organization_view(Permission.JOB_WRITE)
def retry(request: OrganizationRequest, job_id: str) -> HttpResponse:
    """Start a failed job again with the suggested change, at most at the `cap` shown on the button."""
    job = queries.get_job(organization=request.organization, id=job_id)
    form = CapForm(request.POST)
    if not form.is_valid():
        messages.error(request, gettext("The cap is an amount in dollars, such as 2.50."))
        return redirect("web:job_detail", job_id=job_id)
    with domain_errors_shown(request):
        again = retry_job(job=job, by=request.membership.user_id, now=db_now(), shown_max_nano=form.cap_nano)
        messages.success(request, gettext("Started again as a new job."))
        return redirect("web:job_detail", job_id=again.pk)
    return redirect("web:job_detail", job_id=job_id)


@require_POST
@organization_view(Permission.JOB_WRITE)
def move(request: OrganizationRequest, job_id: str) -> HttpResponse:
    """Move the queued job to another `option`, at most at the `cap` shown on the button."""
    form = CapForm(request.POST)
    if not form.is_valid() or form.cap_nano is None:
        messages.error(request, gettext("The cap is an amount in dollars, such as 2.50."))
        return redirect("web:job_detail", job_id=job_id)
    option, nodes = request.POST.get("option", ""), request.POST.get("node_count", "")
    node_count = int(nodes) if nodes.isdecimal() and len(nodes) < 4 else None
    act = partial(move_job, option=option, node_count=node_count, shown_max_nano=form.cap_nano)
    return _act(request, job_id, act, gettext("The job moved. It keeps its name and address."))


@require_POST
@organization_view(Permission.JOB_WRITE)
def dismiss(request: OrganizationRequest, job_id: str) -> HttpResponse:
    """Remove a failed job from the overview."""
    job = queries.get_job(organization=request.organization, id=job_id)
    control.dismiss_failure(job=job, by=request.membership.user_id, now=db_now())
    return redirect("web:overview")


def _act(request: OrganizationRequest, job_id: str, act: Callable[..., object], words: str) -> HttpResponse:
    job = queries.get_job(organization=request.organization, id=job_id)
    with domain_errors_shown(request):
        act(job=job, by=request.membership.user_id, now=db_now())
        messages.success(request, words)
    return redirect("web:job_detail", job_id=job_id)


# --- Contexts of the pages --------------------------------------------------------------------------------------


def title_of(job: FineTuningJob) -> str:
    return job.suffix or gettext("%(model)s on %(dataset)s") % {
        "model": job.base_model.display_name,
        "dataset": job.training_file.dataset.name,
    }


def cancel_url(job_id: str) -> str:
    """Return the address of the page that asks for the job's name and then cancels it."""
    return f"{reverse('web:job_cancel_many')}?{urlencode({'job': job_id})}"


def effect_of_stopping(job: FineTuningJob, progress: JobProgress) -> str:
    """Return what happens to the job, to its steps and to its money if it is cancelled now."""
    if job.status in JOB_TERMINAL:
        return gettext("It already ended (%(status)s). Nothing changes.") % {"status": status(job.status).label}
    if job.started_at is None:
        return gettext("It leaves the queue. You pay nothing, and the amount held for it returns to your balance.")
    kept = gettext("It stops and keeps its last checkpoint.")
    if not job.step:
        kept = gettext("It has not finished a step, so no checkpoint is kept.")
    elif job.status == JobStatus.RUNNING:
        kept = gettext("It saves a checkpoint at its current step, %(step)s of %(total)s, and stops.") % {
            "step": number(job.step),
            "total": number(job.total_steps),
        }
    if job.status == JobStatus.PAUSED:
        return gettext("%(kept)s You paid %(cost)s.") % {"kept": kept, "cost": usd(job.cost_nano)}
    return gettext("%(kept)s You pay about %(cost)s. The rest of the amount held returns to your balance.") % {
        "kept": kept,
        "cost": usd(progress.spent_nano),
    }


def _rights(request: OrganizationRequest, job: FineTuningJob) -> dict[str, bool]:
    return {
        "is_live": job.status not in JOB_TERMINAL,
        "may_write": may_write(request, Permission.JOB_WRITE, job.project_id),
    }


def _state(request: OrganizationRequest, job: FineTuningJob) -> dict[str, Any]:
    """Return the context of the part above the tabs."""
    losses = with_number(job, "train_loss").order_by("sequence")
    best = with_number(job, "valid_loss").order_by("number", "sequence").first()
    now, is_live = db_now(), job.status not in JOB_TERMINAL
    version = job.adapter_version
    return {
        "job": job,
        "title": title_of(job),
        "owner": _owner_of(job),
        "progress": (progress := get_progress(job=job, now=now)),
        "phases": phases_of(job=job, progress=progress, now=now),
        "loss": losses.values_list("number", flat=True).last(),
        "first_loss": losses.values_list("number", flat=True).first(),
        "best": best.data if best else None,
        "has_validation": bool(job.validation_file_id or job.hyperparameters.get("validation_share")),
        "estimated_seconds": _estimated_seconds(job, is_live=is_live),
        "billed_seconds": job.billed_gpu_ms / 1000,
        "is_minimum": not is_live and job.billed_gpu_ms > charges.trained_ms(job=job),
        "wait": (wait := explain_wait(job=job, now=now)),
        "moves": list_moves(job=job, wait=wait, now=now),
        "pause": _pause_state(job),
        "stop_effect": effect_of_stopping(job, progress),
        "cancel_url": cancel_url(job.pk),
        "is_repeatable": is_repeatable(job),
        "explanation": (why := explain(job=job, now=now)),
        "retry_url": Draft.of_job(job, changes=why.suggestion.change.recipe).url() if why else "",
        "retry_cap": usd_decimal(why.suggestion.hold_nano) if why and why.suggestion.hold_nano else "",
        "is_served": version is not None and serving_states(versions=[version])[version.pk].is_deployed,
        "method": method_words(job),
        **_rights(request, job),
    }


def _owner_of(job: FineTuningJob) -> str:
    """Return the person who created the job, or the name of the key that did; "" if it is gone."""
    if job.created_by.startswith("key_"):
        key = list_keys(organization=job.organization).filter(pk=job.created_by).first()
        return gettext("key %(name)s") % {"name": key.name} if key else ""
    person = User.objects.filter(pk=job.created_by).first()
    return str(person) if person else ""


def _estimated_seconds(job: FineTuningJob, *, is_live: bool) -> float:
    """Return the estimate for the time shown: from claim to end while the job is live, then the billed time."""
    if is_live:
        return job.estimate.get("run_seconds_p50") or job.estimate.get("train_seconds_p50") or 0.0
    return (job.estimate.get("billed_seconds_p50") or 0.0) * job.gpu_count


def _pause_state(job: FineTuningJob) -> dict[str, object] | None:
    """Return the amount that a resume would hold, and whether it needs a higher cap; None unless the job is paused."""
    if job.status != JobStatus.PAUSED:
        return None
    return {
        "hold_nano": attempts.resume_hold_nano(job=job),
        "is_at_cap": job.spend_cap_nano < (least_nano := charges.least_cap_of(job=job)),
        "least_cap_nano": least_nano,
        "has_checkpoint": queries.latest_checkpoint(job=job) is not None,
        "suggested_cap": usd_decimal(_suggested_cap_nano(job, least_nano)),
    }


def _suggested_cap_nano(job: FineTuningJob, least_nano: int) -> int:
    """Return twice the cap in whole cents, or the maximum of a firm price."""
    doubled_nano = -(-max(2 * job.spend_cap_nano, least_nano) // NANO_PER_CENT) * NANO_PER_CENT
    return min(doubled_nano, job.firm_max_nano or doubled_nano)
