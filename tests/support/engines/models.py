"""The base model of these tests, and the names that an engine serves it and its adapters under."""

from gpu_workers.common.config import REPOSITORY

BASE_MODEL = REPOSITORY / "demo" / "base_model"
SERVED_NAME = "b-demo"


def name_of(word: str) -> str:
    return "a-" + word.ljust(26, "0")
