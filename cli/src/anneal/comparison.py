"""Jobs side by side: where their settings differ, and what came of each."""

from typing import Any

from rich.table import Table

from anneal.api import Api, job_path, model_path
from anneal.output import dollars, table

_LATEST = 100  # events in which the last losses are looked for


def comparison(api: Api, job_ids: list[str]) -> dict[str, Any]:
    """Return each job's facts and settings, and the names of the settings that differ."""
    compared = [_compared(api, job_id) for job_id in job_ids]
    names = dict.fromkeys(name for job in compared for name in job["recipe"])
    differing = [name for name in names if len({repr(job["recipe"].get(name)) for job in compared}) > 1]
    return {"object": "job.comparison", "differing": differing, "data": compared}


def comparison_table(found: dict[str, Any]) -> Table:
    jobs = found["data"]
    rows: list[tuple[object, ...]] = [
        (name, *(job[name] for job in jobs))
        for name in ("status", "model", "training_file", "fine_tuned_model", "train_loss", "valid_loss")
    ]
    rows += [("cost", *(dollars(job["cost_usd"]) for job in jobs))]
    scores = dict.fromkeys(name for job in jobs for name in job["scores"])
    rows += [(name, *(job["scores"].get(name) for job in jobs)) for name in scores]
    rows += [(name, *(job["recipe"].get(name) for job in jobs)) for name in found["differing"]]
    return table(("", *(job["id"] for job in jobs)), rows)


def _compared(api: Api, job_id: str) -> dict[str, Any]:
    job = api.get(job_path(job_id))
    losses: dict[str, float] = {}
    for event in api.get(f"{job_path(job_id)}/events", limit=_LATEST)["data"]:
        for name in ("train_loss", "valid_loss"):
            if (value := (event["data"] or {}).get(name)) is not None:
                losses.setdefault(name, value)
    model = job["fine_tuned_model"]
    report = api.get(model_path(model)).get("evaluation") if model else None  # on held-out rows
    kept = ("id", "status", "model", "training_file", "fine_tuned_model", "cost_usd", "trained_tokens", "recipe")
    return {name: job[name] for name in kept} | {
        "train_loss": losses.get("train_loss"),
        "valid_loss": losses.get("valid_loss"),
        "scores": {name: value for name, value in (report or {}).items() if isinstance(value, int | float)},
    }
