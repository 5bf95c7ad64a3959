"""Base models and prices for tests."""

from pathlib import Path
from typing import Any

from apps.catalog.models import BaseModel
from apps.catalog.operations import add_base_model
from apps.core.database.clock import db_now

DEMO_FOLDER = Path(__file__).resolve().parents[2] / "demo/base_model"


def make_base_model(name: str = "anneal-demo", **fields: Any) -> BaseModel:
    """The demo's real model, installed: its tokenizer and chat template, from the repository."""
    return add_base_model(
        name=name,
        display_name="Anneal demo",
        path=DEMO_FOLDER,
        licence="Apache-2.0",
        by="system",
        now=db_now(),
        **fields,
    )


def make_listed_model(name: str = "qwen3-0.6b", **fields: Any) -> BaseModel:
    """A model that is quoted but not installed."""
    defaults = {
        "repo": "Qwen/Qwen3-0.6B",
        "parameter_count": 596_049_920,
        "context_length": 40960,
    }
    return BaseModel.objects.create(name=name, display_name=name, **(defaults | fields))
