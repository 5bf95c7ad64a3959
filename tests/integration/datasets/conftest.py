"""Stores that hold uploads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.test import override_settings

from apps.core.objects.store import open_store
from tests.twins.s3 import serve_s3


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    with serve_s3("uploads") as url:
        yield url


@pytest.fixture(params=["directory", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    url = f"file://{tmp_path}/objects" if request.param == "directory" else request.getfixturevalue("s3_url")
    open_store.cache_clear()
    with override_settings(OBJECT_STORE=url):
        yield request.param
    open_store.cache_clear()
