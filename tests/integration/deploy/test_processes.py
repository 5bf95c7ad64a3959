"""The table of programs, how supervisor reads it, and what setup and launch promise."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from configparser import RawConfigParser
from dataclasses import replace
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from urllib.parse import urlsplit

import pytest

from apps.contracts.serving import MAX_CHOICES
from gpu_workers.common.config import EngineConfig, child_environment
from gpu_workers.engine.command import build_command, build_environment
from gpu_workers.engine.state import EnginePaths, ReplicaBase
from scripts import with_services
from scripts.embedded import runtime_dir
from scripts.environment import EnvironmentIncomplete, plain_environment, prepare
from scripts.launch import starting
from scripts.launch.health import health_check
from scripts.processes import PROGRAMS, REPOSITORY, Place, Tier
from scripts.supervision import LAUNCH_MARK, LaunchFailed, Supervision, find_leftovers, render_config

# The plugin that starts services for the tests sets these for Django; a launcher starts from a plain shell.
PLAIN_SHELL = {
    name: value for name, value in os.environ.items() if not re.match("ANNEAL_|DATABASE_|REDIS_|CELERY_", name)
}
WORKERS = [program for program in PROGRAMS if program.venv == ".venv-engines"]


@pytest.fixture(autouse=True)
def _plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(PLAIN_SHELL):
        monkeypatch.delenv(name)


def test_a_worker_is_given_no_secret_of_the_control_plane(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, is_debug=False, is_launch=False)

    for program in WORKERS:
        variables = prepared.variables(program)
        assert not {name for name in variables if re.search("SECRET|PEPPER|SIGNING|DATABASE|REDIS_URL", name)}
        assert prepared.known["ANNEAL_SECRET_KEY"] not in variables.values()
        assert variables.get("CELERY_BROKER_URL", "anneal_trainer").count("anneal_trainer") == 1


def test_each_control_program_logs_in_as_its_own_role(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, is_debug=False, is_launch=False)

    logins = {program.name: prepared.variables(program).get("DATABASE_URL", "") for program in prepared.programs}

    roles = {name: re.findall(r"anneal_\w+", url)[:1] for name, url in logins.items() if url}
    assert roles == {
        "web": ["anneal_app"],
        "internal": ["anneal_internal"],
        "gateway": ["anneal_gateway"],
        "celery": ["anneal_sys"],
        "celery-data": ["anneal_sys"],
        "celery-data-middle": ["anneal_sys"],
        "celery-data-small": ["anneal_sys"],
        "celery-batches": ["anneal_sys"],
        "celery-mail": ["anneal_sys"],
        "celery-webhooks": ["anneal_sys"],
        "beat": ["anneal_sys"],
    }


def test_a_shell_that_has_read_the_env_file_still_means_the_embedded_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, is_debug=False, is_launch=True)
    for line in (tmp_path / "env").read_text().splitlines():
        name, value = shlex.split(line)[0].split("=", 1)
        monkeypatch.setenv(name, value)

    assert prepare(tmp_path, is_debug=False, is_launch=True).services is not None


def test_the_variables_of_another_data_directory_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNEAL_HOME", "/somewhere/else")
    monkeypatch.setenv("ANNEAL_PUBLIC_URL", "http://testserver")
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")

    assert prepare(tmp_path, is_debug=False, is_launch=False).public_url == "http://127.0.0.1:8000"


def test_programs_inherit_nothing_of_ours_from_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANNEAL_SECRET_KEY", "DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "PLAIN"):
        monkeypatch.setenv(name, "x")

    inherited = plain_environment()

    assert "PLAIN" in inherited and not {"ANNEAL_SECRET_KEY", "DATABASE_URL", "AWS_SECRET_ACCESS_KEY"} & set(inherited)


def test_half_of_an_external_configuration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("ANNEAL_HOME", str(tmp_path))

    with pytest.raises(EnvironmentIncomplete, match="DATABASE_APP_URL"):
        prepare(tmp_path, is_debug=False, is_launch=True)


def test_a_database_url_alone_is_refused_and_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://elsewhere/anneal")
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("ANNEAL_HOME", str(tmp_path))

    with pytest.raises(EnvironmentIncomplete, match=r"DATABASE_APP_URL.*REDIS_URL.*DATABASE_URL alone"):
        prepare(tmp_path, is_debug=False, is_launch=True)


def test_a_command_with_services_says_what_is_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    monkeypatch.setenv("ANNEAL_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["with_services", "--home", str(tmp_path), "true"])

    assert with_services.main() == 1
    assert capsys.readouterr().err.startswith("For external PostgreSQL and Redis also set: DATABASE_APP_URL")


def test_secrets_are_made_once_and_readable_by_their_owner_only(tmp_path: Path) -> None:
    first = prepare(tmp_path, is_debug=False, is_launch=True)
    second = prepare(tmp_path, is_debug=False, is_launch=True)

    assert first.known["ANNEAL_SECRET_KEY"] == second.known["ANNEAL_SECRET_KEY"]
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("secrets.json", "env", "ports.json")] == [0o600] * 3


def test_two_launches_at_once_choose_different_ports_although_nothing_listens_yet(tmp_path: Path) -> None:
    chosen = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        known = prepare(tmp_path / name, is_debug=False, is_launch=True).known
        chosen += [known["WEB_PORT"], known["INTERNAL_PORT"]]

    assert len(set(chosen)) == 4


@pytest.mark.parametrize(("host", "listening"), [("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.1")])
def test_the_dashboard_is_up_if_its_own_program_runs_and_answers_where_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, listening: str
) -> None:
    monkeypatch.setenv("ANNEAL_WEB_HOST", host)
    prepared = prepare(tmp_path, is_debug=False, is_launch=False)
    [web] = [program for program in PROGRAMS if program.name == "web"]
    with HTTPServer((listening, 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        known = {**prepared.known, "WEB_PORT": str(server.server_port)}
        checks = [
            health_check(replace(prepared, known=known), cast(Supervision, supervision), web)
            for supervision in (SimpleNamespace(is_running=lambda _: True), SimpleNamespace(is_running=lambda _: False))
        ]
        answers = [check() for check in checks]
        server.shutdown()

    assert urlsplit(prepared.public_url).hostname == listening
    assert answers == [True, False]


def test_supervisor_stops_the_trainer_first_and_postgres_last(tmp_path: Path) -> None:
    text = render_config(
        PROGRAMS,
        Place(dict.fromkeys(NAMES, "x"), pythons={".venv": "/py", ".venv-engines": "/py"}),
        home=tmp_path,
        runtime_dir=tmp_path,
        variables={program.name: {"URL": "postgresql://x@/y?host=%2Ftmp"} for program in PROGRAMS},
    )
    config = RawConfigParser(strict=True)
    config.read_string(text)

    # supervisord stops groups from the highest priority number down, each before the next.
    assert {tier: config[f"group:{tier}"]["priority"] for tier in Tier} == {tier: str(i) for i, tier in enumerate(Tier)}
    assert config["program:web"]["environment"] == 'URL="postgresql://x@/y?host=%%2Ftmp"'
    assert all(config[f"program:{program.name}"]["autorestart"] == "true" for program in PROGRAMS)


NAMES = sorted({name for program in PROGRAMS for name in re.findall(r"\$\{(\w+)\}", program.command)})


@pytest.mark.parametrize("value", ['say "no"', "two\nlines", "a ;b", "a #b"])
def test_a_value_that_supervisor_would_cut_is_refused(value: str, tmp_path: Path) -> None:
    place = Place(dict.fromkeys(NAMES, "x"), pythons={".venv": "/py", ".venv-engines": "/py"})

    with pytest.raises(LaunchFailed, match="plainer"):
        render_config(PROGRAMS[:1], place, home=tmp_path, runtime_dir=tmp_path, variables={"postgres": {"A": value}})


SUPERVISE = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
from scripts.embedded import runtime_dir
from scripts.environment import EnvironmentIncomplete, plain_environment, prepare
from scripts.processes import Program, Tier
from scripts.supervision import LaunchFailed, Supervision, lock

home = Path(sys.argv[1])
held = lock(home)
try:
    lock(home)
except LaunchFailed as failure:
    refusal = str(failure)
def module(name, command): return Program(name, Tier.CONTROL, command, needs=frozenset(), options=frozenset())
programs = (module("steady", "http.server 0 --bind 127.0.0.1"), module("escaping", "tests.integration.deploy.escaping"))
supervision = Supervision(replace(prepare(home, is_debug=False, is_launch=True), programs=programs))
supervision.start()
supervision.start_tier(Tier.CONTROL)
def pid_of(name): return supervision.states()[name]["pid"]
def wait(check):
    for _ in range(3000):
        if check(): return
        time.sleep(0.02)
    raise SystemExit("waited in vain")
wait(lambda: pid_of("steady") and Path(home, "escaped").exists())
wait(lambda: supervision.states()["steady"]["statename"] == "RUNNING")  # from now on an exit is a crash
import os, signal
environ = Path(f"/proc/{supervision._daemon.pid}/environ").read_bytes().split(b"\\0")
killed = pid_of("steady")
os.kill(killed, signal.SIGKILL)
wait(lambda: pid_of("steady") not in (0, killed))
supervision.stop()
escaped = int(Path(home, "escaped").read_text())
print(json.dumps({
    "refusal": refusal, "left": [p.pid for p in supervision.leftovers], "escaped": escaped,
    "alive": Path(f"/proc/{escaped}").exists(), "is_marked": f"LAUNCHED_BY_ANNEAL={home}".encode() in environ,
}))
"""


@pytest.mark.slow
def test_a_killed_program_comes_back_and_an_escaped_process_is_found_counted_and_ended(tmp_path: Path) -> None:
    home = tmp_path / "C# 1%25 mine"  # supervisor has its own meanings for such signs
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISE, str(home)], cwd=REPOSITORY, capture_output=True, text=True, timeout=240
    )
    shutil.rmtree(runtime_dir(home), ignore_errors=True)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "already runs" in found["refusal"]
    assert found["left"] == [found["escaped"]] and not found["alive"]
    assert found["is_marked"]  # after kill -9 of its launcher the next one finds supervisord, and all below it


LAUNCH = """
import os, subprocess, sys, time
from dataclasses import replace
from pathlib import Path
from scripts.environment import prepare
from scripts.launch import __main__ as launch
from scripts.processes import Program, Tier
from scripts.supervision import Supervision

def run(given, home):
    speaker = Program("speaker", Tier.CONTROL, "http.server 0 --bind 127.0.0.1", needs=frozenset(), options=frozenset())
    supervision = Supervision(replace(prepare(home, is_debug=False, is_launch=True), programs=(speaker,)))
    supervision.start()
    supervision.start_tier(Tier.CONTROL)
    while not (home / "logs/speaker.log").exists(): time.sleep(0.02)
    supervision.stop()
    return 0

os.umask(0o022)
launch._run = run
sys.argv = ["up.py", "--home", sys.argv[1]]
sys.exit(launch.main())
"""


@pytest.mark.slow
def test_what_a_launch_writes_is_readable_for_its_account_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"

    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(home)], cwd=REPOSITORY, capture_output=True, text=True, timeout=240
    )

    assert done.returncode == 0, done.stderr
    logs = [path for path in (home / "logs").rglob("*") if path.is_file()]
    assert {path.name for path in logs} >= {"speaker.log", "supervisord.log"}
    modes = {path: path.stat().st_mode & 0o777 for path in home.rglob("*") if not path.is_symlink()}
    others = 0o066  # as root, PostgreSQL's own account passes through the folder of sockets
    assert {str(path): oct(mode) for path, mode in modes.items() if mode & others} == {}


DEATH_SIGNAL = "import ctypes; signal = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(signal)); "


def test_the_preparation_of_the_database_ends_with_a_launcher_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it goes on beside that of the next launch."""
    asked = f"{DEATH_SIGNAL}raise SystemExit(f'The kernel sends it {{signal.value}}.')"
    monkeypatch.setattr(starting, "MANAGE", (sys.executable, "-c", asked))

    with pytest.raises(LaunchFailed, match=rf"The kernel sends it {signal.SIGTERM:d}\."):
        starting._prepare_data(prepare(tmp_path, is_debug=False, is_launch=False))


def test_every_lock_pins_exact_versions_once_and_the_cpu_engines_bring_no_cuda() -> None:
    for path in (REPOSITORY / "requirements").rglob("*.lock"):
        lines = [line.partition(" --hash=")[0] for line in path.read_text().splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines), path.name
        assert len({line.split("==")[0].lower() for line in lines}) == len(lines), path.name
    names = ("torch-cpu", "engines-cpu", "engines")
    cpu = "".join((REPOSITORY / f"requirements/engines/{name}.lock").read_text() for name in names)
    assert "torch==2.13.0+cpu" in cpu and not re.search(
        r"^(nvidia-(?!ml-py)|triton|torchvision|torchaudio|torchcodec)", cpu, re.M
    )


def test_the_line_for_running_vllm_by_hand_is_the_line_in_service() -> None:
    script = (REPOSITORY / "deploy/vllm/serve.sh").read_text().replace("\\\n", " ")
    config = EngineConfig(work_dir=Path("/w"), kv_cache_bytes=0)
    command = build_command(
        config,
        ReplicaBase(served_name="b-x"),
        model_path=str(REPOSITORY / "demo" / "base_model"),
        paths=EnginePaths(Path("/w")),
    )
    of_cpus = {"--kv-cache-memory-bytes", "--max-num-seqs"}
    in_service = {word for word in command if word.startswith("--")} - of_cpus

    by_hand = set(re.findall(r"(?<!\S)--[a-z-]+", script.split("exec ", 1)[1]))

    assert by_hand == in_service
    switches = {line for line in build_environment(config) if line.startswith(("VLLM_", "HF_HUB", "DO_NOT"))}
    assert switches - {"VLLM_CPU_OMP_THREADS_BIND"} <= set(re.findall(r"([A-Z_]+)=", script))
    assert f"VLLM_MAX_N_SEQUENCES={MAX_CHOICES}\n" in script


def test_the_children_of_workers_are_found_after_a_killed_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCH_MARK, str(tmp_path))
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        env=child_environment(threads=1),
        cwd="/",
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        child.stdout.readline()  # the environment of a process can be read once it runs its own program
        mark = f"{LAUNCH_MARK}={tmp_path}".encode()
        assert mark in Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
        assert child.pid in {process.pid for process in find_leftovers(tmp_path)}
    finally:
        child.kill()
        child.communicate()
