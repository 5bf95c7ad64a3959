"""Base models and prices for tests."""

import copy
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from apps.catalog.model_files import ModelFolder, read_model_folder
from apps.catalog.models import BaseModel, HubLookup
from apps.catalog.operations import add_base_model, base_model_roots
from apps.core.database.clock import db_now

DEMO_FOLDER = Path(__file__).resolve().parents[2] / "demo/base_model"


def make_base_model(name: str = "anneal-demo", **fields: Any) -> BaseModel:
    """The demo's real model, installed: its tokenizer and chat template, from the repository."""
    with patch("apps.catalog.operations.read_model_folder", lambda *_, **__: copy.deepcopy(_demo())):
        return add_base_model(
            name=name,
            display_name="Anneal demo",
            path=DEMO_FOLDER,
            licence="Apache-2.0",
            by="system",
            now=db_now(),
            **fields,
        )


@cache
def _demo() -> ModelFolder:
    """Read the folder once for a whole run: its hashes and its tokenizer take longer than most tests."""
    return read_model_folder(DEMO_FOLDER, roots=base_model_roots())


def make_hub_lookup(base_model: BaseModel, **fields: Any) -> HubLookup:
    """An answered lookup of `acme/tiny`, which may be installed; its config.json is that of the base model."""
    repository = {
        "repo": "acme/tiny", "revision": "c" * 40, "is_gated": False, "licence": "Apache-2.0",
        "licence_url": "https://huggingface.co/acme/tiny",
        "files": [{"name": "model.safetensors", "bytes": 12_786_176, "sha256": "d" * 64}],
    }  # fmt: skip
    model = {"config": base_model.config, "parameter_count": 6_393_088, "context_length": 512}
    given = {"repo": "acme/tiny", "repository": repository, "model": model, "answered_at": db_now()}
    return HubLookup.objects.create(requested_by="user_operator", **(given | fields))


def make_listed_model(name: str = "qwen3-0.6b", **fields: Any) -> BaseModel:
    """A model that is quoted but not installed."""
    defaults = {
        "repo": "Qwen/Qwen3-0.6B",
        "parameter_count": 596_049_920,
        "context_length": 40960,
        "display_name": name,
    }
    return BaseModel.objects.create(name=name, **(defaults | fields))
