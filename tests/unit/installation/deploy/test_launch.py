"""How a launch chooses ports, says what it does, and counts its seconds."""

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import pytest

from scripts.environment import Prepared, prepare
from scripts.launch import main_job, ports
from scripts.launch import starting as launch
from scripts.processes import PROGRAMS, Tier
from scripts.supervision import LaunchFailed, Supervision


@pytest.fixture(autouse=True)
def _plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if re.match("ANNEAL_|DATABASE_|REDIS_|CELERY_", name)]:
        monkeypatch.delenv(name)


Take = Callable[..., None]


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Take:
    """Return what makes ports taken; no socket is opened."""
    taken: set[int] = set()
    any_free = iter(range(40_000, 50_000))

    class Probe:
        port = 0

        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def setsockopt(self, *_: object) -> None:
            pass

        def __init__(self, family: int) -> None:
            pass

        def bind(self, address: tuple[str, int] | str) -> None:
            if isinstance(address, str):
                return
            if address[1] in taken:
                raise OSError(errno.EADDRINUSE, "taken")
            self.port = address[1] or next(any_free)

        def detach(self) -> None:
            pass

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", self.port

    fake = SimpleNamespace(socket=Probe, AF_UNIX=1, AF_INET=2, AF_INET6=10, SOL_SOCKET=1, SO_REUSEADDR=2)
    monkeypatch.setattr(ports, "socket", fake)

    def take(*ports: int) -> None:
        taken.clear()
        taken.update(ports)

    return take


def ports_of(prepared: Prepared) -> tuple[str, str]:
    return prepared.known["WEB_PORT"], prepared.known["INTERNAL_PORT"]


# --- ports and files kept between launches ------------------------------------------------------------------------


def test_free_ports_are_the_usual_ones(tmp_path: Path, take: Take) -> None:
    prepared = prepare(tmp_path, is_debug=False, is_launch=True)

    assert ports_of(prepared) == ("8000", "8001") and prepared.notes == ()


def test_addresses_of_further_replicas_join_that_of_the_own_one(
    tmp_path: Path, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = prepare(tmp_path, is_debug=False, is_launch=True).known["ANNEAL_REPLICA_ADDRESSES"]
    for given in ("10.20.0.0/16", f"10.20.0.0/16,{own}"):
        monkeypatch.setenv("ANNEAL_REPLICA_ADDRESSES", given)
        prepared = prepare(tmp_path, is_debug=False, is_launch=True)
        assert prepared.known["ANNEAL_REPLICA_ADDRESSES"] == f"10.20.0.0/16,{own}"


def test_a_taken_port_gives_way_to_the_next_free_one_and_is_named(tmp_path: Path, take: Take) -> None:
    take(8000)

    prepared = prepare(tmp_path, is_debug=False, is_launch=True)

    assert ports_of(prepared) == ("8001", "8002")
    assert prepared.notes[0] == "Port 8000 is taken: the dashboard uses port 8001."
    assert prepared.public_url == "http://127.0.0.1:8001"


def test_a_later_launch_keeps_its_ports_unless_they_are_taken_now(tmp_path: Path, take: Take) -> None:
    take(8000)
    prepare(tmp_path, is_debug=False, is_launch=True)
    take()
    kept = prepare(tmp_path, is_debug=False, is_launch=True)
    take(8001, 8002)
    moved = prepare(tmp_path, is_debug=False, is_launch=True)

    assert ports_of(kept) == ("8001", "8002") and kept.notes == ()
    assert ports_of(moved) == ("8003", "8004")
    assert json.loads((tmp_path / "ports.json").read_text())["public_url"] == "http://127.0.0.1:8003"


def test_with_a_hundred_ports_taken_any_free_one_is_used(tmp_path: Path, take: Take) -> None:
    take(*range(8000, 8200))

    assert prepare(tmp_path, is_debug=False, is_launch=True).known["WEB_PORT"] == "40000"


@pytest.mark.parametrize("text", ["", "{", "[1]"])
@pytest.mark.parametrize("name", ["ports.json", "secrets.json", "env"])
def test_a_file_that_was_cut_off_is_written_again(tmp_path: Path, take: Take, name: str, text: str) -> None:
    prepare(tmp_path, is_debug=False, is_launch=True)
    (tmp_path / name).write_text(text)

    again = prepare(tmp_path, is_debug=False, is_launch=True)

    assert ports_of(again) == ("8000", "8001") and len(again.known["ANNEAL_SECRET_KEY"]) > 40
    assert len((tmp_path / name).read_text()) > 50


def test_a_folder_with_spaces_and_signs_stays_whole_in_commands_and_addresses(tmp_path: Path, take: Take) -> None:
    home = tmp_path / "C# 100%25 mine"
    home.mkdir()
    prepared = prepare(home, is_debug=False, is_launch=True)
    shutil.rmtree(prepared.runtime_dir)  # such a path has its sockets under /tmp

    commands = {program.name: prepared.place.command(program) for program in prepared.programs}

    assert commands["postgres"][1:] == ["-m", "scripts.embedded", "postgres", "--data-dir", str(home)]
    assert commands["beat"][-4:] == ["--schedule", f"{home}/celerybeat-schedule", "--pidfile", ""]
    assert commands["web"][-4:] == ["--host", "127.0.0.1", "--port", "8000"]
    assert unquote(urlsplit(prepared.known["ANNEAL_OBJECT_STORE"]).path) == f"{home}/objects"
    assert prepared.known["ANNEAL_MAIL_FOLDER"] == f"{home}/mail"


# --- what starts when, and what is said ---------------------------------------------------------------------------


class Supervised:
    """A supervisor of programs that do not exist."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.started: list[str] = []

    def start(self) -> None:
        self.started.append("supervisord")

    def start_tier(self, tier: Tier) -> None:
        self.started.append(tier)

    def check(self) -> None:
        pass

    def tail(self, name: str) -> str:
        return f"; the end of {self.logs / name}.log"

    def states(self) -> dict[str, dict[str, Any]]:
        return {program.name: {"pid": 7} for program in PROGRAMS}


class AtOnce(Executor):
    """Does at once what it is given, in the caller's thread."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class Started:
    """A start whose programs answer, except the `silent` ones; time passes only while it sleeps."""

    def __init__(self, prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
        self.silent: set[str] = set()
        self.now = 100.0
        self.prepared = prepared
        self.supervised = Supervised(prepared.home)
        time = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(launch, "time", time)
        monkeypatch.setattr(main_job, "time", time)
        monkeypatch.setattr(launch, "health_check", lambda _, __, program: lambda: program.name not in self.silent)
        monkeypatch.setattr(launch, "_prepare_data", lambda _: self.supervised.started.append("data"))
        self.supervision = cast(Supervision, self.supervised)
        self.starting = launch.Starting(prepared, self.supervision, checks=AtOnce())

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def bring_up(self) -> None:
        launch.bring_up(self.starting)
        self.starting.update()


@pytest.fixture
def started(tmp_path: Path, take: Take, monkeypatch: pytest.MonkeyPatch) -> Started:
    (tmp_path / "demo.json").write_text(json.dumps({"email": "demo@anneal.localhost", "password": "secret-word"}))
    return Started(prepare(tmp_path, is_debug=False, is_launch=True), monkeypatch)


def test_the_web_process_starts_first_on_prepared_data_and_the_trainer_last(started: Started) -> None:
    started.silent = {"trainer"}

    started.bring_up()

    assert started.supervised.started == [
        "supervisord",
        Tier.SERVICES,
        "data",
        Tier.WEB,
        Tier.CONTROL,
        Tier.SERVING,
        Tier.TRAINING,
    ]
    assert not started.starting.is_up


@pytest.mark.parametrize(
    ("url", "is_embedded", "has_demo"),
    [
        ("http://127.0.0.1:8000", True, True),
        ("http://localhost:8000", True, True),
        ("https://anneal.example.com", True, False),
        ("http://0.0.0.0:8000", True, False),
        ("http://127.0.0.1:8000", False, False),
    ],
)
def test_the_demo_operator_is_made_only_where_no_one_else_comes(
    tmp_path: Path, take: Take, url: str, is_embedded: bool, has_demo: bool
) -> None:
    prepared = prepare(tmp_path, is_debug=False, is_launch=True)
    known = {**prepared.known, "ANNEAL_PUBLIC_URL": url}
    prepared = replace(prepared, known=known, services=prepared.services if is_embedded else None)
    (tmp_path / "demo.json").write_text(json.dumps({"email": "demo@anneal.localhost", "password": "secret-word"}))

    said = launch._sign_in(prepared)

    assert launch.has_demo(prepared) is has_demo
    assert ("secret-word" in said, "createoperator" in said) == (has_demo, not has_demo)


def test_sockets_that_servers_make_open_to_all_lie_in_a_private_folder(tmp_path: Path, take: Take) -> None:
    prepared = prepare(tmp_path, is_debug=False, is_launch=True)

    socket = Path(prepared.known["ANNEAL_GATEWAY_URL"].removeprefix("unix://"))

    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert prepared.known["ANNEAL_EMAIL_URL"] == f"file://{tmp_path}/mail"
    assert prepared.known["ANNEAL_MAIL_FOLDER"] == f"{tmp_path}/mail"


def test_the_dashboard_is_announced_when_the_web_server_answers_and_before_anything_else_does(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    started.silent = {"internal", "celery"}

    with pytest.raises(LaunchFailed, match=r"internal did not become healthy; the end of .*internal"):
        started.bring_up()

    said = capsys.readouterr().out
    assert re.search(r"The dashboard is open:  http://127.0.0.1:8000\n.*demo@anneal.localhost\n.*secret-word", said)


def test_programs_that_answer_later_are_waited_for_side_by_side(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    started.silent = {"vllm"}
    started.bring_up()

    assert not started.starting.watch()
    assert "trainer           is up" in capsys.readouterr().out and not (started.prepared.home / "ready.json").exists()

    started.now, started.silent = started.now + 55.0, set()
    started.starting.update()  # asks again
    assert started.starting.watch()

    assert "55.0 s  vllm              is up" in capsys.readouterr().out
    assert json.loads((started.prepared.home / "ready.json").read_text())["pids"]["vllm"] == 7


def test_an_engine_that_does_not_answer_is_named_with_its_log_and_stops_nothing(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    started.silent = {"vllm"}
    started.bring_up()

    for _ in range(40):
        started.sleep(10)
        started.starting.watch()

    said = capsys.readouterr().out
    assert said.count("vllm does not answer after 300 s. Everything else runs. Log: ") == 1


def test_after_a_main_job_that_failed_the_command_to_run_it_again_is_said(started: Started) -> None:
    assert main_job.after_main_job(started.prepared, 0) == ""

    said = main_job.after_main_job(started.prepared, 1)

    assert "Everything keeps running: http://127.0.0.1:8000" in said
    assert f".venv/bin/python -m demo.main_job --home {started.prepared.home}" in said


# --- the figures --------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".anneal").mkdir()
    setup = tmp_path / ".anneal/setup.json"
    setup.write_text('{"seconds_install": 60.5}')
    os.utime(setup, (70.0, 70.0))
    monkeypatch.setattr(main_job, "REPOSITORY", tmp_path)
    return tmp_path


def test_a_fresh_clone_counts_from_the_command_that_was_typed(started: Started, repository: Path) -> None:
    started.bring_up()
    started.starting.seconds |= {"web": 20.0, "vllm": 90.0}

    figures = main_job.figures_of_start(started.starting, 8.0, is_new=True, ended_at=338.0)

    assert figures.pop("seconds_until_up")["vllm"] == 90.0
    assert figures == {
        "seconds_install": 60.5,
        "seconds_clone_to_dashboard": 112.0,  # the launcher began at 100
        "seconds_clone_to_end_of_main_job": 330.0,
        "seconds_start_to_dashboard": 20.0,
        "seconds_start": 90.0,
    }


@pytest.mark.parametrize(("began_at", "is_new"), [(90.0, True), (8.0, False), (None, True)])
def test_seconds_since_the_clone_have_no_meaning_with_packages_or_data_from_before(
    began_at: float | None, is_new: bool, started: Started, repository: Path
) -> None:
    started.bring_up()

    figures = main_job.figures_of_start(started.starting, began_at, is_new=is_new, ended_at=338.0)

    assert figures["seconds_clone_to_dashboard"] is figures["seconds_clone_to_end_of_main_job"] is None
    assert figures["seconds_install"] == (60.5 if began_at == 8.0 else None)
    assert figures["seconds_start"] is not None


def test_the_seconds_of_a_start_that_did_not_finish_are_not_said(started: Started, repository: Path) -> None:
    started.silent = {"vllm"}
    started.bring_up()

    figures = main_job.figures_of_start(started.starting, None, is_new=True, ended_at=None)

    assert figures["seconds_start"] is None and figures["seconds_start_to_dashboard"] is not None


def test_an_external_place_waits_for_no_embedded_service(started: Started) -> None:
    programs = tuple(program for program in started.prepared.programs if not program.is_embedded_only)
    external = replace(started.prepared, programs=programs)
    starting = launch.Starting(external, started.supervision, checks=AtOnce())

    launch.bring_up(starting)

    assert not {"postgres", "redis"} & starting.seconds.keys()
    assert Tier.SERVICES not in started.supervised.started  # supervisord has no group without programs
