"""`anneal.yaml`: a model as code, what changed since it was last trained, and the gates of its promotion."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from anneal.api import JOBS, Api
from anneal.failures import ExitCode, Failure
from anneal.migration.configs import read_config
from anneal.transfers import hash_of
from anneal.watching import FAILED
from apps.contracts.evaluation import ConfidenceInterval
from apps.contracts.evaluation.paired_shares import is_surely_above

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_MARK = "apply."  # begins the keys of a job's metadata that say what it was made from
_LONGEST_VALUE = 512
_MOST_JOBS, _MOST_FILES = 100, 2_000
_OF_TOKENS = ("loss", "token_accuracy")  # measures that depend on the base model's tokenizer


class Bounds(msgspec.Struct, forbid_unknown_fields=True):
    min: float | None = None
    max: float | None = None


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """The members of `anneal.yaml`. Paths start at its folder. `project` is the id of one in the organization."""

    name: str
    dataset: str
    model: str
    project: str | None = None
    held_out: str | None = None
    method: str = "supervised"
    recipe: dict[str, Any] = {}
    lora: dict[str, Any] = {}
    quantization: str | None = None
    evaluation: dict[str, Any] = {}
    pool: str | None = None
    node_count: Annotated[int, msgspec.Meta(ge=1)] = 1
    max_cost_usd: float | None = None
    gates: dict[str, Bounds] = {}
    beat_current: bool = True
    alias: str | None = None


def read_manifest(path: Path) -> Manifest:
    """Return the manifest. Raises Failure that names the member."""
    try:
        manifest = msgspec.convert(read_config(path), Manifest)
    except msgspec.ValidationError as error:
        raise Failure(f"{path}: {error}.", ExitCode.USAGE) from error
    if not _NAME.fullmatch(manifest.name):
        text = f"{path}: name has 1 to 40 of a-z, 0-9 and -, and starts and ends with a letter or digit."
        raise Failure(text, ExitCode.USAGE)
    if (manifest.gates or (manifest.alias and manifest.beat_current)) and not manifest.held_out:
        text = f"{path}: gates need held_out, a file of rows that are not trained on. Or set beat_current: false."
        raise Failure(text, ExitCode.USAGE)
    return manifest


def content_of(manifest: Manifest, folder: Path) -> dict[str, str]:
    """Return what decides about training, by name: hashes of the files, and the settings. Raises OSError."""
    found: dict[str, Any] = {
        "dataset": hash_of(folder / manifest.dataset),
        "held_out": hash_of(folder / manifest.held_out) if manifest.held_out else None,
        "model": manifest.model,
        "method": manifest.method,
        "recipe": manifest.recipe,
        "lora": manifest.lora,
        "quantization": manifest.quantization,
        "evaluation": manifest.evaluation,
    }
    return {name: _text(value) for name, value in found.items() if value not in (None, {})}


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _LONGEST_VALUE else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def metadata_of(manifest: Manifest, content: dict[str, str]) -> dict[str, str]:
    return {f"{_MARK}name": manifest.name} | {f"{_MARK}{name}": text for name, text in content.items()}


def last_applied(jobs: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest of a manifest's jobs that did not fail, wherever it was applied from."""
    return next((job for job in jobs if job["status"] not in (FAILED, "cancelled")), None)


def key_of(manifest: Manifest, content: dict[str, str], newest: dict[str, Any] | None) -> str:
    """Return the idempotency key of the job after the newest one: two runs at once start one job."""
    about = [metadata_of(manifest, content), newest and newest["id"]]
    text = json.dumps([*about, manifest.project] if manifest.project else about, sort_keys=True)
    return f"apply:{hashlib.sha256(text.encode()).hexdigest()}"


def manifest_jobs(api: Api, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield the latest jobs of this manifest, newest first."""
    params: dict[str, object] = {f"metadata[{_MARK}name]": manifest.name}
    yield from api.pages(JOBS, limit=_MOST_JOBS, project=manifest.project, **params)


def is_same_measure(job: dict[str, Any], other: dict[str, Any] | None) -> bool:
    """Return whether two jobs were measured on the same held-out rows, by the same grader."""
    if other is None:
        return False
    names = [f"{_MARK}held_out", f"{_MARK}evaluation"]
    return all(job["metadata"].get(name) == other["metadata"].get(name) for name in names)


def changes(content: dict[str, str], last: dict[str, Any] | None) -> list[dict[str, str | None]]:
    """Return what differs from the last job."""
    kept = (last or {}).get("metadata") or {}
    before = {key.removeprefix(_MARK): text for key, text in kept.items() if key.startswith(_MARK)}
    before.pop("name", None)
    names = [*content, *(name for name in before if name not in content)]
    return [
        {"name": name, "before": before.get(name), "now": content.get(name)}
        for name in names
        if before.get(name) != content.get(name)
    ]


def find_files(api: Api) -> dict[str, str]:
    """Return the ids of uploaded files by the hash of their content; of equal ones the newest, whose columns count."""
    found: dict[str, str] = {}
    for file in api.pages("/v1/files", limit=_MOST_FILES, purpose="fine-tune"):  # newest first
        if file.get("sha256") and file["status"] == "processed":
            found.setdefault(file["sha256"], file["id"])
    return found


def request_of(manifest: Manifest, content: dict[str, str], file_ids: dict[str, str]) -> dict[str, Any]:
    """Return the body of the request for the job."""
    compute: dict[str, Any] = {}
    if manifest.pool:
        compute["pool"] = manifest.pool
    if manifest.node_count > 1:
        compute["node_count"] = manifest.node_count
    body = {
        "model": manifest.model,
        "training_file": file_ids["dataset"],
        "validation_file": file_ids.get("held_out"),
        "suffix": manifest.name,
        "method": {"type": manifest.method},
        "recipe": manifest.recipe,
        "lora": manifest.lora,
        "quantization": manifest.quantization,
        "evaluation": manifest.evaluation,
        "compute": compute,
        "budget": None if manifest.max_cost_usd is None else {"max_cost_usd": str(manifest.max_cost_usd)},
        "metadata": metadata_of(manifest, content),
    }
    return {name: value for name, value in body.items() if value not in (None, {})}


# --- gates ------------------------------------------------------------------------------------------------------------


class Gate(msgspec.Struct):
    name: str
    passed: bool
    text: str


def check_gates(
    manifest: Manifest,
    report: dict[str, Any] | None,
    *,
    current: dict[str, Any] | None,
    is_comparable: bool,
    has_other_base: bool = False,
) -> list[Gate]:
    """Return each gate with its outcome. `current` is the report of the model that the alias points at today."""
    measures = {each["name"]: each for each in (report or {}).get("comparisons") or ()}
    gates = [_bounded(name, bounds, measures) for name, bounds in manifest.gates.items()]
    if manifest.beat_current and current is not None:
        gates.append(_better(measures, current, is_comparable=is_comparable, has_other_base=has_other_base))
    return gates


def _bounded(name: str, bounds: Bounds, measures: dict[str, Any]) -> Gate:
    if name not in measures:
        return Gate(name, False, f"It was not measured. Measured: {', '.join(measures) or 'nothing'}.")
    value = measures[name]["tuned"]["value"]
    is_in = (bounds.min is None or value >= bounds.min) and (bounds.max is None or value <= bounds.max)
    both = (("at least", bounds.min), ("at most", bounds.max))
    limits = [f"{word} {limit:g}" for word, limit in both if limit is not None]
    return Gate(name, is_in, f"{value:.4g}, wanted {' and '.join(limits) or 'any'}.")


def _better(measures: dict[str, Any], current: dict[str, Any], *, is_comparable: bool, has_other_base: bool) -> Gate:
    """Compare the grader's measure on the same held-out rows, or the loss where no answers were graded.

    The new model is better if the 95 % interval of the difference leaves out zero.
    """
    before = {each["name"]: each for each in current.get("comparisons") or ()}
    both = [name for name in measures if name in before]
    name = next((each for each in both if each not in _OF_TOKENS), both[0] if both else None)
    if not is_comparable or name is None:
        text = "The current model was not measured on these held-out rows, so nothing shows which one is better."
        return Gate("beat_current", False, text)
    if has_other_base and name in _OF_TOKENS:
        text = f"The {name} of another base model counts other tokens. Have answers graded, to compare with that model."
        return Gate("beat_current", False, text)
    is_higher_better = measures[name].get("is_higher_better", True)
    new, old = (msgspec.convert(found[name]["tuned"], ConfidenceInterval) for found in (measures, before))
    is_better = is_surely_above(new, old) if is_higher_better else is_surely_above(_negative(new), _negative(old))
    text = f"{name} {_with_range(new)}, the current model's {_with_range(old)}."
    if not is_better and (new.value > old.value) == is_higher_better and new.value != old.value:
        text += " The difference may be chance: use more held-out rows, or a model that is better by more."
    return Gate("beat_current", is_better, text)


def _negative(interval: ConfidenceInterval) -> ConfidenceInterval:
    return ConfidenceInterval(value=-interval.value, low=-interval.high, high=-interval.low)


def _with_range(interval: ConfidenceInterval) -> str:
    return f"{interval.value:.4g} ({interval.low:.4g} to {interval.high:.4g})"
