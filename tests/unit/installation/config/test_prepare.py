"""`manage.py prepare`: a new installation becomes ready to serve, and one that is ready stays as it is."""

import os
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder
from pytest_django import Settings

from apps.accounts.models import User
from apps.catalog.models import GpuType, PriceRule
from apps.finetuning.models import GpuPool

MANIFEST_STORAGE = "whitenoise.storage.CompressedManifestStaticFilesStorage"


@pytest.fixture(autouse=True)
def home(settings: Settings, tmp_path: Path) -> Path:
    """An installation of one static file."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files/site.css").write_text("a { color: red }")
    settings.PUBLIC_URL = "http://127.0.0.1:8000"
    settings.HOME, settings.STATIC_ROOT = tmp_path, tmp_path / "static"
    settings.STATICFILES_DIRS = [tmp_path / "files"]
    settings.STORAGES = settings.STORAGES | {"staticfiles": {"BACKEND": MANIFEST_STORAGE}}
    return tmp_path


def prepare(*options: str) -> str:
    said = StringIO()
    call_command("prepare", *options, stdout=said)
    return said.getvalue()


@pytest.mark.slow
def test_a_second_time_adds_nothing(transactional_db: None, home: Path) -> None:
    first = prepare("--demo")
    account, pools, prices = (home / "demo.json").read_text(), GpuPool.objects.count(), PriceRule.objects.count()
    assert "(new)" in first and pools and prices

    second = prepare("--demo")

    assert "GPU types: 0 new; base models: 0 new; prices: 0 new" in second and "(new)" not in second
    assert (home / "demo.json").read_text() == account
    assert (GpuPool.objects.count(), PriceRule.objects.count()) == (pools, prices)


def test_a_database_of_another_version_is_refused_and_stays_as_it_is(db: None) -> None:
    MigrationRecorder(connection).record_applied("billing", "0099_other")

    with pytest.raises(CommandError, match=r"it has billing\.0099_other and 0 more migrations that this version lacks"):
        prepare()
    assert not GpuType.objects.exists()


@pytest.mark.slow
def test_without_the_demonstration_there_is_a_catalogue_and_no_pool(transactional_db: None, home: Path) -> None:
    prepare()

    assert GpuType.objects.exists() and not GpuPool.objects.exists()
    assert not (home / "demo.json").exists() and not (home / "static").exists()


@pytest.mark.slow
def test_static_files_are_collected_again_only_when_one_changed(transactional_db: None, home: Path) -> None:
    manifest = home / "static/staticfiles.json"
    prepare("--demo")
    assert "site" in manifest.read_text()

    os.utime(manifest, (manifest.stat().st_atime + 60,) * 2)
    collected = manifest.stat().st_mtime_ns
    prepare("--demo")
    assert manifest.stat().st_mtime_ns == collected

    earlier = manifest.stat().st_mtime - 3600  # after a clock that stepped back, or from an archive
    (home / "files/site.css").write_text("a { color: green }")
    os.utime(home / "files/site.css", (earlier, earlier))
    prepare("--demo")
    assert manifest.stat().st_mtime_ns != collected


@pytest.mark.parametrize(
    ("url", "database"), [("https://anneal.example.com", "/run/pg"), ("http://10.0.0.7:8000", "/run/pg"),
                          ("http://127.0.0.1:8000", "db.example.com"), ("http://127.0.0.1.example.com", "/run/pg")]
)  # fmt: skip
def test_no_demo_operator_where_others_could_sign_in(
    db: None, home: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, url: str, database: str
) -> None:
    settings.PUBLIC_URL = url
    monkeypatch.setitem(settings.DATABASES["default"], "HOST", database)

    with pytest.raises(CommandError, match=r"createoperator|embedded database"):
        prepare("--demo")

    assert not User.objects.exists() and not (home / "demo.json").exists()


@pytest.mark.slow
def test_the_local_pool_needs_no_account(transactional_db: None, home: Path) -> None:
    prepare("--local")

    assert GpuPool.objects.exists() and (home / "trainer/enroll.token").exists()
    assert not User.objects.exists() and not (home / "demo.json").exists()
