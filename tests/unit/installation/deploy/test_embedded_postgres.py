"""How the embedded PostgreSQL gets its account and its cluster; tests/integration/core runs the server itself."""

import fcntl
import os
import pwd
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.embedded import postgres, servers
from scripts.embedded.places import services
from scripts.embedded.servers import EmbeddedServiceError


def test_roots_path_without_the_programs_of_administrators_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's `su` without `-` keeps the path of the user."""
    commands: list[list[str]] = []

    def which(name: str, path: str) -> str | None:
        return f"/usr/sbin/{name}" if "/usr/sbin" in path.split(":") else None

    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin")
    monkeypatch.setattr(servers.shutil, "which", which)
    monkeypatch.setattr(servers, "run_or_explain", lambda command, **_: commands.append(command))

    servers._create_postgres_account()
    assert commands[0][0] == "/usr/sbin/useradd" and commands[0][-1] == servers.POSTGRES_ACCOUNT


def test_the_account_that_another_process_creates_meanwhile_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    account = pwd.getpwuid(os.getuid())
    created: list[pwd.struct_passwd] = []

    def find(name: str) -> pwd.struct_passwd:
        if not created:
            raise KeyError(name)
        return created[0]

    def refuse(*_: object) -> None:
        created.append(account)
        raise EmbeddedServiceError("useradd failed with code 9: the user exists already")

    monkeypatch.setattr(servers.os, "getuid", lambda: 0)
    monkeypatch.setattr(servers, "pwd", SimpleNamespace(getpwnam=find))
    monkeypatch.setattr(servers, "_create_postgres_account", refuse)

    assert servers.postgres_account() == account


def test_folders_that_a_umask_closed_let_postgres_through_to_its_program_and_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, cluster = tmp_path / "clone/.venv/bin/postgres", tmp_path / "clone/.anneal/postgres"
    program.parent.mkdir(parents=True)
    program.touch()
    cluster.mkdir(parents=True)
    closed = [tmp_path / name for name in ("clone", "clone/.venv", "clone/.venv/bin", "clone/.anneal")]
    for folder in closed:
        folder.chmod(0o700)
    monkeypatch.setattr(postgres, "_postgres_bin", lambda: program.parent)

    postgres._let_walk_to(cluster)
    assert {folder.stat().st_mode & 0o777 for folder in closed} == {0o701}


def make_cluster(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Make a cluster with an initdb that writes one file; return the folders it wrote to."""
    drafts: list[Path] = []

    def initdb(command: list[str], *, cwd: Path, **_: Any) -> None:
        (cwd / "PG_VERSION").write_text("18\n")
        drafts.append(cwd)

    monkeypatch.setattr(postgres, "postgres_account", lambda: None)
    monkeypatch.setattr(postgres, "_postgres_bin", lambda: Path("/nowhere"))
    monkeypatch.setattr(postgres, "run_or_explain", initdb)
    postgres._make_cluster(data_dir, durable=False)
    return drafts


def test_drafts_of_an_initdb_that_was_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("postgres.new.a1", "postgres.new.b2"):
        (tmp_path / name / "base").mkdir(parents=True)
        (tmp_path / name / "base/half").touch()

    make_cluster(tmp_path, monkeypatch)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.lock", "postgres"]


def test_of_two_starts_in_a_new_folder_the_second_waits_for_the_cluster_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it removes the draft in which the other's initdb writes."""
    cluster, lock = tmp_path / "postgres", fcntl.flock

    def flock(file: Any, kind: int) -> None:
        cluster.mkdir()  # meanwhile
        (cluster / "PG_VERSION").touch()
        lock(file, kind)

    monkeypatch.setattr(servers.fcntl, "flock", flock)

    assert make_cluster(tmp_path, monkeypatch) == []


def test_the_roles_are_read_from_a_clone_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "o'brien\\n"
    odd.mkdir()
    shutil.copy(postgres.ROLES_SQL, odd)
    read: list[tuple[str, Path]] = []
    monkeypatch.setattr(postgres, "ROLES_SQL", odd / "roles.sql")
    monkeypatch.setattr(postgres, "_postgres_bin", lambda: Path("/nowhere"))
    monkeypatch.setattr(postgres, "run_or_explain", lambda command, *, cwd, text: read.append((text, cwd)))

    postgres._apply_roles(services(tmp_path), passwords={})
    [(text, folder)] = read
    assert "\\i roles.sql\n" in text and folder == odd
