"""`manage.py prepare`: a new installation becomes ready to serve, and one that is ready stays as it is."""

import os
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command
from pytest_django import Settings

from apps.catalog.models import GpuType, PriceRule
from apps.finetuning.models import GpuPool

MANIFEST_STORAGE = "whitenoise.storage.CompressedManifestStaticFilesStorage"


@pytest.fixture(autouse=True)
def home(settings: Settings, tmp_path: Path) -> Path:
    """An installation of one static file."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files/site.css").write_text("a { color: red }")
    settings.HOME, settings.STATIC_ROOT = tmp_path, tmp_path / "static"
    settings.STATICFILES_DIRS = [tmp_path / "files"]
    settings.STORAGES = settings.STORAGES | {"staticfiles": {"BACKEND": MANIFEST_STORAGE}}
    return tmp_path


def prepare(*options: str) -> str:
    said = StringIO()
    call_command("prepare", *options, stdout=said)
    return said.getvalue()


def test_a_second_time_adds_nothing(transactional_db: None, home: Path) -> None:
    first = prepare("--demo")
    account, pools, prices = (home / "demo.json").read_text(), GpuPool.objects.count(), PriceRule.objects.count()
    assert "(new)" in first and pools and prices

    second = prepare("--demo")

    assert "GPU types: 0 new; base models: 0 new; prices: 0 new" in second and "(new)" not in second
    assert (home / "demo.json").read_text() == account
    assert (GpuPool.objects.count(), PriceRule.objects.count()) == (pools, prices)


def test_without_the_demonstration_there_is_a_catalogue_and_no_pool(transactional_db: None, home: Path) -> None:
    prepare()

    assert GpuType.objects.exists() and not GpuPool.objects.exists()
    assert not (home / "demo.json").exists() and not (home / "static").exists()


def test_static_files_are_collected_again_only_when_one_changed(transactional_db: None, home: Path) -> None:
    manifest = home / "static/staticfiles.json"
    prepare("--demo")
    assert "site" in manifest.read_text()

    os.utime(manifest, (manifest.stat().st_atime + 60,) * 2)
    collected = manifest.stat().st_mtime_ns
    prepare("--demo")
    assert manifest.stat().st_mtime_ns == collected

    later = manifest.stat().st_mtime + 60
    os.utime(home / "files/site.css", (later, later))
    prepare("--demo")
    assert manifest.stat().st_mtime_ns != collected
