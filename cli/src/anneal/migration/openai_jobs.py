"""Fine-tuning jobs and files of OpenAI, from its API or from a folder, and the plan of each job here."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from anneal.api import JOBS, Api
from anneal.failures import ExitCode, Failure
from anneal.migration.base_models import suggest
from anneal.migration.plans import IMPORTED_MODEL, Plan, Setting, suffix_of
from anneal.output import notice
from anneal.texts import text_of

_FILE_ID = re.compile(r"[A-Za-z0-9_-]{1,120}")
_MOST_JOBS = 10_000
_KEPT_METADATA = 14  # of 16; two say where the job came from
_SAME = {
    "n_epochs": "An epoch is one pass over the rows, here too.",
    "batch_size": "The number of rows in a step, here too.",
    "beta": "The beta of DPO, here too.",
}
_MULTIPLIER = (
    "It multiplies a rate that OpenAI does not publish, for another model. Anneal chooses a rate for the base model "
    "here; --set learning_rate=… sets one."
)
_CHECKPOINTS = (
    "Only the final model's name is given to the new model. To name a checkpoint as well, run `anneal models alias`."
)
_REINFORCEMENT = (
    "Reinforcement fine-tuning is not offered. If its rows have an ideal answer, `anneal files convert` makes "
    "supervised rows of them."
)


class Source(Protocol):
    def jobs(self) -> Iterator[dict[str, Any]]: ...

    def fetch(self, file_id: str, folder: Path) -> Path: ...


class OpenAi:
    """OpenAI's API. The key stays in this process."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def jobs(self) -> Iterator[dict[str, Any]]:
        yield from self._api.pages(JOBS, limit=_MOST_JOBS)

    def fetch(self, file_id: str, folder: Path) -> Path:
        """Return the file in the folder, downloaded if it is not there yet. Raises Failure."""
        target = folder / f"{_safe(file_id)}.jsonl"
        if target.exists():
            return target
        part = target.with_name(f"{target.name}.part")
        with self._api.stream("GET", f"/v1/files/{file_id}/content") as response, part.open("wb") as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
        return part.replace(target)


class Export:
    """A folder with `jobs.json`, the answer of `GET /v1/fine_tuning/jobs`, and each file as `<id>` or `<id>.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def jobs(self) -> Iterator[dict[str, Any]]:
        path = self._folder / "jobs.json"
        try:
            found = json.loads(text_of(path.read_bytes(), str(path)))
        except (ValueError, RecursionError) as error:
            raise Failure(f"{path} is not JSON: {error}.", ExitCode.LOCAL) from error
        rows = found.get("data") if isinstance(found, dict) else found
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise Failure(f"{path} has no list of jobs. Save the answer of GET /v1/fine_tuning/jobs.", ExitCode.LOCAL)
        if isinstance(found, dict) and found.get("has_more"):
            notice(f"{path} is one page of several, so older jobs are missing. Save one list of all pages' jobs.")
        yield from rows

    def fetch(self, file_id: str, folder: Path) -> Path:
        """Return the file. Raises Failure if it is missing."""
        for name in (f"{_safe(file_id)}.jsonl", _safe(file_id)):
            if (path := self._folder / name).is_file():
                return path
        raise Failure(f"{self._folder} has no {file_id}.jsonl.", ExitCode.NOT_FOUND)


def _safe(file_id: str) -> str:
    if not _FILE_ID.fullmatch(file_id):
        raise Failure(f"{file_id!r} is not the id of a file.", ExitCode.REFUSED)
    return file_id


def distinct(jobs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each job once, because pages that were saved one by one overlap. One that succeeded by now comes first."""
    found: dict[object, dict[str, Any]] = {}
    for number, job in enumerate(jobs):
        place = str(job["id"]) if job.get("id") else number
        if place not in found or job.get("status") == "succeeded":
            found[place] = job
    return list(found.values())


def plan_of(job: Mapping[str, Any], *, catalogue: Sequence[str], chosen: Mapping[str, str]) -> Plan:
    """Return the plan of one job. Files are still those of OpenAI, in `request`."""
    source = str(job.get("model"))
    old_name = str(job.get("fine_tuned_model") or "") or None
    plan = Plan(f"openai:{job.get('id') or ''}", source, alias=old_name)
    kind, given = _method(job)
    if not job.get("id"):
        plan.obstacle = "It has no id, so another import could not tell that it was imported."
    elif (status := job.get("status")) != "succeeded":
        state = f"It is {status}" if status else "It has no status"
        plan.obstacle = f"{state} at OpenAI; only succeeded jobs are imported."
    elif kind not in ("supervised", "dpo"):
        plan.obstacle = _REINFORCEMENT if kind == "reinforcement" else f"The method {kind} is not offered."
    if plan.obstacle:
        return plan
    # A job that went on from a fine-tuned model has that model's name: the base is its second part.
    base = source.split(":")[1] if source.startswith("ft:") and source.count(":") > 1 else source
    found = suggest(base, catalogue=catalogue, chosen=chosen)
    plan.base_model, plan.base_reason = found.model, found.reason
    if found.model is None:
        plan.obstacle = f"{found.reason[0].upper()}{found.reason[1:]}."
    if base != source:
        text = "The earlier model stays at OpenAI, so training begins with the base model."
        plan.settings.append(Setting("model", source, "ignored", text))
    kept = dict(_settings(given, plan.settings))
    parts = (old_name or "").split(":")  # the fourth part of five is the suffix
    suffix = job.get("user_provided_suffix") or (parts[3] if len(parts) > 4 else "")
    metadata = dict(list(_object(job, "metadata").items())[:_KEPT_METADATA])
    if old_name:
        metadata[IMPORTED_MODEL] = old_name
    plan.request = {
        "model": found.model,
        "training_file": job.get("training_file"),
        "validation_file": job.get("validation_file"),
        "suffix": suffix_of(str(suffix)),
        "seed": job.get("seed"),
        "method": {"type": kind, kind: {"hyperparameters": kept}},
        "metadata": metadata,
    }
    plan.request = {name: value for name, value in plan.request.items() if value not in (None, "")}
    if old_name:
        plan.settings.append(Setting("checkpoints", "", "ignored", _CHECKPOINTS))
    if job.get("integrations"):
        plan.settings.append(Setting("integrations", "", "ignored", "Connect the tracker in Anneal's settings."))
    return plan


def _method(job: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    method = _object(job, "method")
    kind = str(method.get("type") or "supervised")
    return kind, _object(_object(method, kind), "hyperparameters") or _object(job, "hyperparameters")


def _object(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = parent.get(name)
    return found if isinstance(found, dict) else {}


def _settings(given: Mapping[str, Any], lines: list[Setting]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if name in _SAME and isinstance(value, int | float):
            lines.append(Setting(name, str(value), "mapped", _SAME[name]))
            yield name, value
        elif name == "learning_rate_multiplier" and value != "auto":
            lines.append(Setting(name, str(value), "ignored", _MULTIPLIER))
        elif value != "auto":
            lines.append(Setting(name, str(value)[:40], "unsupported", "Anneal has no such setting."))
