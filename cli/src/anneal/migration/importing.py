"""The work of an import: files sent once, prices, jobs and the old names; a folder remembers what was done."""

import codecs
import json
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anneal.api import JOBS, NOT_LOADED, Api
from anneal.commands.files import check_file, read_given, wait_for_file
from anneal.commands.requests import budget_of
from anneal.failures import ExitCode, Failure
from anneal.migration.openai_jobs import Source
from anneal.migration.plans import IMPORTED_FROM, Plan, Setting
from anneal.migration.rows import PAIR, Conversion, conversion_text, convert_file
from anneal.output import notice
from anneal.session import Session
from anneal.transfers import hash_of, upload
from anneal.watching import SUCCEEDED

_SHOWN_LINES = 20
_FIRST_BYTES = 1024


@dataclass
class Memory:
    """What an import has done, in a folder: uploads by hash, and jobs by where they came from. It has no key."""

    folder: Path
    address: str
    uploads: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, address: str) -> "Memory":
        """Return the folder's memory. Raises Failure if it is of another installation or damaged."""
        memory = cls(folder, address)
        try:
            kept = json.loads(memory._path.read_text())
            if kept["address"] != address:
                text = f"{folder} holds an import into {kept['address']}. Give another --folder for {address}."
                raise Failure(text, ExitCode.USAGE)
            memory.uploads, memory.jobs = dict(kept["uploads"]), dict(kept["jobs"])
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            text = f"{memory._path} is damaged. Delete it: jobs that exist are found again."
            raise Failure(text, ExitCode.LOCAL) from error
        return memory

    def add(self, plan: Plan, job_id: str) -> None:
        """Remember the plan's job. Of several jobs for one old name, the last one that was imported gets the name."""
        others = {key: kept for key, kept in self.jobs.items() if not plan.alias or kept["alias"] != plan.alias}
        self.jobs = others | {plan.key: {"job": job_id, "alias": plan.alias}}

    def keep(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"address": self.address, "uploads": self.uploads, "jobs": self.jobs}, indent=2))
        new.replace(self._path)

    @property
    def files(self) -> Path:
        """Return the folder of downloaded and converted files."""
        path = self.folder / "files"
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path

    @property
    def _path(self) -> Path:
        return self.folder / "state.json"


def find_job(api: Api, key: str) -> dict[str, Any] | None:
    """Return the newest job that was imported from there, which may be a retry of an earlier one."""
    params: dict[str, object] = {f"metadata[{IMPORTED_FROM}]": key}
    return next(api.pages(JOBS, limit=1, **params), None)


def fetch_files(plan: Plan, source: Source, memory: Memory) -> None:
    """Fetch the plan's files. One for validation that is gone is left out. Raises Failure for one to train on."""
    plan.files = {}
    for member in ("training_file", "validation_file"):
        if member not in plan.request:
            continue
        try:
            plan.files[member] = source.fetch(str(plan.request[member]), memory.files)
        except Failure as failure:
            if failure.exit_code != ExitCode.NOT_FOUND or member == "training_file":
                raise
            gone = Setting(
                member, str(plan.request.pop(member)), "ignored", f"{failure.message} The job is made without it."
            )
            plan.settings.append(gone)
            notice(gone.line)


def convert_and_check(plan: Plan, memory: Memory) -> None:
    """Convert the plan's files where they need it. An obstacle is set if the rules of files refuse one."""
    for member, path in plan.files.items():
        target = memory.files / f"{path.stem}-{hash_of(path)[:12]}.converted.jsonl"  # names may be equal
        mapping = plan.mappings.get(member)
        chosen, rejected = ((mapping or {}).get("columns", {}).get(name, name) for name in PAIR)
        done = convert_file(path, target, pair=(chosen, rejected)) if _is_json_lines(path) else Conversion()
        if done.is_changed:
            plan.files[member] = target
            plan.settings.append(Setting(member, path.name, "mapped", conversion_text(done)))
            notice(f"{path.name}: {conversion_text(done)}")
            for line, reason in done.problems[:_SHOWN_LINES]:
                notice(f"{path.name}, line {line} is left out: {reason}")
        else:
            target.unlink(missing_ok=True)
        report = check_file(plan.files[member], read_given(json.dumps(mapping)) if mapping else None)
        if not report.is_valid:
            first = report.errors[0]
            plan.obstacle = f"{path.name}, line {first.line}: {first.message} {first.fix}"


def _is_json_lines(path: Path) -> bool:
    """Return whether the file has rows that may need a conversion. Files of an export may have no suffix."""
    if path.suffix:
        return path.suffix == ".jsonl"
    with path.open("rb") as file:
        return file.read(_FIRST_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")


def send_files(session: Session, plans: Iterable[Plan], memory: Memory) -> None:
    """Upload each content once, and put the ids into the requests. Files that the server refuses are obstacles."""
    for plan in plans:
        for member, path in plan.files.items():
            file = _sent(session, path, memory, plan.mappings.get(member))
            plan.request[member] = file["id"]
            if file["status"] == "error":
                plan.obstacle = f"{path.name}: {file['status_details']}"


def _sent(session: Session, path: Path, memory: Memory, mapping: dict[str, Any] | None) -> dict[str, Any]:
    content = hash_of(path) + (json.dumps(mapping, sort_keys=True) if mapping else "")
    if known := memory.uploads.get(content):
        try:
            return wait_for_file(session, session.api.get(f"/v1/files/{known}"))
        except Failure as failure:
            if failure.exit_code != ExitCode.NOT_FOUND:
                raise
    file = upload(session, path, purpose="fine-tune", mapping=mapping)
    memory.uploads[content] = file["id"]
    memory.keep()
    return wait_for_file(session, file)


def quote(api: Api, plan: Plan) -> None:
    """Ask for the price of the plan; a refusal is its obstacle."""
    try:
        plan.quote = api.post(JOBS, plan.request | {"dry_run": True})
    except Failure as failure:
        if failure.exit_code not in (ExitCode.REFUSED, ExitCode.NOT_FOUND):
            raise
        plan.obstacle = failure.message
        return
    if refusal := plan.quote["refusal"]:
        plan.obstacle = refusal["message"]


def start(api: Api, plan: Plan) -> dict[str, Any]:
    """Create the job, once also if two imports run at a time; it is refused if it may cost more than was quoted."""
    assert plan.quote is not None
    request = plan.request | {"budget": budget_of(plan.request, shown_usd=plan.quote["hold_usd"])}
    key = str(uuid.uuid5(uuid.NAMESPACE_URL, f"anneal import {plan.key} {plan.job_before}"))
    try:
        job: dict[str, Any] = api.post_once(JOBS, request, key=key)
    except Failure as failure:
        if failure.code != "idempotency_key_reused":
            raise
        text = f"Another import has just started the job of {plan.key}. Run the command again to follow it."
        raise Failure(text, ExitCode.REFUSED, details=failure.details) from failure
    plan.job = job
    return job


def name_models(api: Api, memory: Memory) -> list[dict[str, Any]]:
    """Point the old name of each succeeded job at its model, and return where each job stands.

    A name that has an alias already is left as it is: it may have moved since.
    """
    taken = _taken(api)
    return [_named(api, key, kept, taken) for key, kept in memory.jobs.items()]


def standing(api: Api, memory: Memory) -> list[dict[str, Any]]:
    """Return where each job of an import stands, and change nothing."""
    taken = _taken(api)
    return [_state(key, kept, find_job(api, key), taken) for key, kept in memory.jobs.items()]


def _taken(api: Api) -> dict[str, str]:
    """Return the version of each alias by its name."""
    return {alias["name"]: alias["version"] for alias in api.pages("/api/v1/aliases", limit=sys.maxsize)}


def _named(api: Api, key: str, kept: dict[str, Any], taken: dict[str, str]) -> dict[str, Any]:
    job = find_job(api, key)
    state = _state(key, kept, job, taken)
    if job is None or job["status"] != SUCCEEDED or state["alias_of"] or not kept["alias"]:
        return state
    try:
        api.post_once("/api/v1/aliases", {"name": kept["alias"], "version": job["fine_tuned_model"]})
    except Failure as failure:
        if failure.exit_code != ExitCode.REFUSED:
            raise
        return state | {"note": failure.message, "is_loading": failure.code == NOT_LOADED}
    return state | {"alias_of": job["fine_tuned_model"]}


def _state(key: str, kept: dict[str, Any], job: dict[str, Any] | None, taken: dict[str, str]) -> dict[str, Any]:
    return {
        "imported_from": key,
        "job": job["id"] if job else kept["job"],
        "status": job["status"] if job else "deleted",
        "model": job["fine_tuned_model"] if job else None,
        "alias": kept["alias"],
        "alias_of": taken.get(kept["alias"] or ""),
        "note": None,
        "is_loading": False,
    }
