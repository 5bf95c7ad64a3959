"""A job that is to be made here from one elsewhere: its request, its files, and a line for each setting."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

IMPORTED_FROM, IMPORTED_MODEL = "imported_from", "imported_model"  # keys of a job's metadata
_LONGEST_KEY = 400  # with what is added, it is no longer than a value of metadata may be


class Setting(NamedTuple):
    """What became of one setting. `outcome` is mapped, ignored or unsupported."""

    name: str
    value: str
    outcome: str
    reason: str

    @property
    def line(self) -> str:
        return f"{self.name} {self.value}".rstrip() + f": {self.outcome}. {self.reason}"


@dataclass
class Plan:
    """`obstacle` is why no job can be made. `alias` is the name that requests use today.

    `key` says what the job is made from: an import finds the job that it made before by its key.
    """

    key: str
    source_model: str
    base_model: str | None = None
    base_reason: str = ""
    request: dict[str, Any] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    files: dict[str, Path] = field(default_factory=dict)  # by the request's member
    mappings: dict[str, dict[str, Any]] = field(default_factory=dict)  # of columns, by the request's member
    alias: str | None = None
    obstacle: str | None = None
    quote: dict[str, Any] | None = None
    job: dict[str, Any] | None = None
    job_before: str | None = None  # that failed, was cancelled or deleted

    def override(self, settings: dict[str, Any]) -> None:
        """Put settings into the recipe. Other settings, or another base model, make another job."""
        if self.obstacle:
            return
        self.key = f"{self.key[:_LONGEST_KEY]}:{self.base_model}"
        if settings:
            text = json.dumps(settings, sort_keys=True)
            self.key += f":{hashlib.sha256(text.encode()).hexdigest()[:12]}"
            self.request["recipe"] = self.request.get("recipe", {}) | settings
        self.request["metadata"] = self.request.get("metadata", {}) | {IMPORTED_FROM: self.key}

    def as_json(self) -> dict[str, Any]:
        quoted = self.quote or {}
        return {
            "imported_from": self.key,
            "source_model": self.source_model,
            "model": self.base_model,
            "model_reason": self.base_reason,
            "alias": self.alias,
            "request": self.request,
            "settings": [setting._asdict() for setting in self.settings],
            "hold_usd": quoted.get("hold_usd"),
            "obstacle": self.obstacle,
            "job": self.job and self.job["id"],
        }


def suffix_of(text: str) -> str:
    """Return the text as a suffix: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
