"""`anneal apply`: train what `anneal.yaml` describes if it changed, and promote it if it passes its gates."""

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from anneal.api import JOBS, NOT_LOADED, PATIENT_ATTEMPTS, Api, model_path
from anneal.commands.files import accepted_id, check_file
from anneal.commands.requests import budget_of
from anneal.failures import ExitCode, Failure
from anneal.manifest import (
    Gate,
    Manifest,
    changes,
    check_gates,
    content_of,
    find_files,
    is_same_measure,
    key_of,
    last_applied,
    manifest_jobs,
    read_manifest,
    request_of,
)
from anneal.output import AsJson, Yes, confirm_price, dollars, emit, notice
from anneal.session import Session, session_of
from anneal.transfers import upload
from anneal.watching import SETTLED, SUCCEEDED, follow

_SECONDS = 2.0
_LONGEST_LOAD_SECONDS = 600


def apply(
    context: typer.Context,
    file: Annotated[Path, typer.Option("--file", "-f", exists=True, dir_okay=False, help="The file.")] = Path(
        "anneal.yaml"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what changed and the price. No job starts.")] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait for the job, check its gates and move the alias. Without it, run the command again when the job "
            "has succeeded.",
        ),
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Train what anneal.yaml describes if it changed since the last job, and promote it if it passes its gates.

    Files are uploaded when their content changed, also by --dry-run, because the price depends on them. Run it again
    at any time: a job that is the same is not started twice. Exits with 1 if the job or a gate fails.
    """
    session = session_of(context)
    manifest = read_manifest(file)
    manifest.project = session.choose_project(manifest.project)
    content = content_of(manifest, file.parent)
    jobs = list(manifest_jobs(session.api, manifest))
    last = last_applied(jobs)
    changed = changes(content, last)
    result: dict[str, Any] = {
        "object": "apply", "name": manifest.name, "changes": changed, "job": last and last["id"],
        "hold_usd": None, "started": False, "gates": [], "promoted": False, "alias": None, "note": None,
    }  # fmt: skip
    job = last
    if changed:
        key = key_of(manifest, content, jobs[0] if jobs else None)
        job = _started(session, manifest, file.parent, content, result, key=key, dry_run=dry_run, yes=yes)
    if job is not None and not dry_run:
        _ended(session.api, manifest, job, result, wait=wait)
    emit(context, result, lambda: _text(result))
    if (result["note"] or "").startswith("It would not start"):
        raise typer.Exit(ExitCode.REFUSED)
    if any(not gate["passed"] for gate in result["gates"]) or result.get("status") in SETTLED - {SUCCEEDED}:
        raise typer.Exit(ExitCode.NEGATIVE)


def _started(
    session: Session,
    manifest: Manifest,
    folder: Path,
    content: dict[str, str],
    result: dict[str, Any],
    *,
    key: str,
    dry_run: bool,
    yes: bool,
) -> dict[str, Any] | None:
    """Return the new job, or None after a dry run. Raises Failure if it is refused or declined."""
    known = find_files(session.api)
    paths = {"dataset": manifest.dataset, "held_out": manifest.held_out}
    ids = {
        name: known.get(content[name]) or _sent(session, folder / path)
        for name, path in paths.items()
        if path is not None
    }
    request = request_of(manifest, content, ids)
    rehearsal = session.api.post(JOBS, request | {"dry_run": True})
    result["hold_usd"] = rehearsal["hold_usd"]
    refusal = rehearsal["refusal"]
    if dry_run:
        result["note"] = f"It would not start: {refusal['message']}" if refusal else None
        return None
    if refusal:
        raise Failure(refusal["message"], ExitCode.REFUSED, details=refusal)
    if not session.as_json:
        notice(_changes_text(result["changes"]))
    confirm_price(rehearsal["hold_usd"], "Start?", is_accepted=yes)
    request["budget"] = budget_of(request, shown_usd=rehearsal["hold_usd"])
    try:
        job: dict[str, Any] = session.api.post_once(JOBS, request, key=key)
    except Failure as failure:
        if failure.code != "idempotency_key_reused":
            raise
        text = f"Another run has just started the job of {manifest.name}. Run `anneal apply` again to follow it."
        raise Failure(text, ExitCode.REFUSED, details=failure.details) from failure
    result |= {"job": job["id"], "started": True}
    if not session.as_json:
        notice(f"Created {job['id']}.")
    return job


def _sent(session: Session, path: Path) -> str:
    report = check_file(path)
    if not report.is_valid:
        first = report.errors[0]
        raise Failure(f"{path}, line {first.line}: {first.message} {first.fix}", ExitCode.NEGATIVE)
    return accepted_id(session, path, upload(session, path, purpose="fine-tune", mapping=None))


def _ended(api: Api, manifest: Manifest, job: dict[str, Any], result: dict[str, Any], *, wait: bool) -> None:
    """Wait for the job if asked, check the gates and move the alias."""
    if wait:
        for now, _ in follow(api, job["id"], tail=1):
            job = now
    result["status"] = job["status"]
    if job["status"] != SUCCEEDED:
        if job["status"] not in SETTLED:
            then = "wait" if manifest.alias is None else "wait and to move the alias"
            result["note"] = f"{job['id']} is {job['status']}. Run `anneal apply --wait` to {then}."
        return
    if manifest.alias is None:
        if not (manifest.gates and job["fine_tuned_model"]):
            return
        result["gates"] = [msgspec.to_builtins(gate) for gate in _gates(api, manifest, job, "")]
        return
    new = job["fine_tuned_model"]
    if new is None:
        text = (
            f"{job['id']} succeeded without a model, so there is nothing to promote. Change the recipe and apply again."
        )
        raise Failure(text, ExitCode.NEGATIVE)
    alias, elsewhere = _aliases(api, manifest, new)
    if alias and alias["version"] == new:
        result["note"] = f"{alias['model']} points to {new}. There is nothing to do."
        return
    if alias and new in (alias["previous_version"], alias["canary_version"]):
        result["note"] = f"{alias['model']} was rolled back from {new} or tests it. Move it by `anneal models alias`."
        return
    if alias and alias["canary_version"]:
        result["note"] = f"{alias['model']} tests {alias['canary_version']}. End that canary, and run it again."
        return
    compared = alias or elsewhere
    gates = _gates(api, manifest, job, compared["version"] if compared else "")
    result["gates"] = [msgspec.to_builtins(gate) for gate in gates]
    if all(gate.passed for gate in gates):
        moved = _promote(api, manifest.alias, new, alias["version"] if alias else "", wait=wait)
        result |= {"promoted": True, "alias": moved["model"]}
        if elsewhere:
            text = (
                f"{elsewhere['model']} still points to {elsewhere['version']}. Use the new name in your applications."
            )
            result["note"] = text
        elif alias is None and manifest.beat_current:
            result["note"] = "The alias is new, so there was no model to beat."


def _aliases(api: Api, manifest: Manifest, new: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the alias that the model would take over, and the newest one of its name for another base model."""
    models = [new, *(job["fine_tuned_model"] for job in manifest_jobs(api, manifest))]
    own, *others = dict.fromkeys(f"{model.rsplit(':', 1)[0]}:{manifest.alias}" for model in models if model)
    alias = _alias(api, manifest.alias) or _alias(api, own)  # an imported alias has a whole name
    return alias, next(filter(None, (_alias(api, name) for name in others)), None)


def _alias(api: Api, model: str | None) -> dict[str, Any] | None:
    """Return the alias with this whole name."""
    return next(api.pages("/api/v1/aliases", limit=1, model=model), None) if model else None


def _gates(api: Api, manifest: Manifest, job: dict[str, Any], current_name: str) -> list[Gate]:
    report = api.get(model_path(job["fine_tuned_model"])).get("evaluation")
    if not current_name:
        return check_gates(manifest, report, current=None, is_comparable=False)
    current = api.get(model_path(current_name)).get("evaluation") or {}
    before = next((each for each in manifest_jobs(api, manifest) if each["fine_tuned_model"] == current_name), None)
    return check_gates(
        manifest,
        report,
        current=current,
        is_comparable=is_same_measure(job, before),
        has_other_base=before is not None and before["base_model"] != job["base_model"],
    )


def _promote(api: Api, name: str, model: str, current: str, *, wait: bool) -> dict[str, Any]:
    """Return the alias once it is moved; with `wait`, once a replica has loaded the model.

    Raises Failure, also if the alias no longer stands for the version that the gates compared with, or has a canary.
    """
    api.attempts = PATIENT_ATTEMPTS
    deadline = time.monotonic() + _LONGEST_LOAD_SECONDS
    while True:
        try:
            body = {"name": name, "version": model, "expected_version": current}
            moved: dict[str, Any] = api.post_once("/api/v1/aliases", body)
            return moved
        except Failure as failure:
            if not (wait and failure.code == NOT_LOADED) or time.monotonic() > deadline:
                raise
        time.sleep(_SECONDS)


def _changes_text(changed: list[dict[str, Any]]) -> str:
    return "\n".join(f"{each['name']}: {_short(each['before'])} -> {_short(each['now'])}" for each in changed)


def _short(text: str | None) -> str:
    """Return a value for people: hashes by their beginning."""
    if text is None:
        return "(none)"
    return text[:12] if len(text) == 64 and text.isalnum() else text


def _text(result: dict[str, Any]) -> str:
    lines = [_changes_text(result["changes"]) or "Nothing changed since the last job."]
    if result["hold_usd"] is not None and not result["started"]:
        lines.append(f"At most {dollars(result['hold_usd'], is_limit=True)}.")
    if result["job"]:
        lines.append(f"Job: {result['job']}")
    lines += [
        f"Gate {gate['name']}: {'passed' if gate['passed'] else 'failed'}. {gate['text']}" for gate in result["gates"]
    ]
    lines += [f"{result['alias']} points to the new model."] if result["promoted"] else []
    lines += [result["note"]] if result["note"] else []
    return "\n".join(lines)
