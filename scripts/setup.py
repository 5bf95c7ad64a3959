"""Create .venv and .venv-engines and install the locked dependencies; instant if they are up to date.

    python3 scripts/setup.py             the requirements of `make demo`
    python3 scripts/setup.py --dev       also the tools of `make check` and `make test`
    python3 scripts/setup.py --browser   also Chromium and Node.js, by apt-get if run as root
    python3 scripts/setup.py --gguf      also llama.cpp's converter, for exports as GGUF

Standard library only. If Anneal does not support this Python, it continues under a supported one from the path.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # it runs as a file, under any Python

from scripts import machine  # noqa: E402
from scripts.installation import installer  # noqa: E402
from scripts.installation.clients import install_clients, install_node_clients, install_programs  # noqa: E402
from scripts.installation.commands import DATA, REQUIREMENTS, NoWheel, SetupFailed, version_of  # noqa: E402
from scripts.installation.environments import Environment, environments, has_nvidia_gpu  # noqa: E402
from scripts.installation.packages import install_locked  # noqa: E402

# `anneal` from any folder; -P ignores an `apps` folder in the current directory.
COMMAND = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" exec "$here/python" -P -m apps.interfaces.cli "$@"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", action="store_true", help="the tools of `make check` and `make test`")
    parser.add_argument("--browser", action="store_true", help="Chromium and Node.js, for the tests that use them")
    parser.add_argument("--gguf", action="store_true", help="llama.cpp's converter, in a folder of its own")
    given = parser.parse_args()
    if foreign := machine.foreign_system():
        sys.stdout.write(f"{foreign}\n")
        return 1
    try:
        if not machine.is_suitable(sys.executable) and (others := machine.suitable_pythons()):
            os.execv(others[-1], [others[-1], __file__, *sys.argv[1:]])  # noqa: S606  no shell wanted
        os.umask(0o022)  # as root, PostgreSQL has an account of its own, which reads its program here
        DATA.mkdir(exist_ok=True)
        with alone():
            seconds = set_up(dev=given.dev, browser=given.browser, gguf=given.gguf)
            if seconds is not None:
                (DATA / "setup.json").write_text(json.dumps({"seconds_install": round(seconds, 1)}) + "\n")
    except SetupFailed as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"Set-up stopped: {machine.explain(error)}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped. Run it again to continue.\n")
        return 130
    if seconds is not None:
        sys.stdout.write(f"  {'installed':<28} {seconds:6.1f} s\n")
    return 0


def set_up(*, dev: bool = False, browser: bool = False, gguf: bool = False) -> float | None:
    """Install missing packages; return the seconds it took, or None if nothing was missing."""
    started = time.monotonic()
    if browser:
        install_programs()  # first: it may need the user, and nothing is downloaded yet
    wanted = environments(dev=dev)
    stale = [environment for environment in wanted if not environment.is_up_to_date()]
    if stale:
        has_gpu = has_nvidia_gpu()
        check_machine(has_gpu=has_gpu)
        download = (machine.GPU_DOWNLOAD_BYTES if has_gpu else machine.DOWNLOAD_BYTES) / machine.GB
        sys.stdout.write(f"Installing packages: once, up to {download:g} GB to download, in minutes on a fast line\n")
        sys.stdout.flush()
        stage("installer (uv)", installer.prepare)  # before environments are changed: it may fail
        with ThreadPoolExecutor(len(stale)) as pool:
            for done in [pool.submit(stage, e.name, partial(install, e)) for e in stale]:
                done.result()
    install_command(wanted[-1])
    if dev:
        install_clients(wanted[-1].python)
    if browser:
        install_node_clients()
    if gguf:
        engines = wanted[0]
        lock = REQUIREMENTS / "engines/gguf.lock"
        install_locked(engines.python, [lock], target=engines.directory / "gguf-converter")
    return time.monotonic() - started if stale else None


@contextmanager
def alone() -> Iterator[None]:
    """Let only one set-up of this folder run at a time. The next one waits and finds the work done."""
    import fcntl  # noqa: PLC0415  not on Windows, where we are gone by now

    with (DATA / "setup.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stdout.write("Another set-up of this folder is running. Waiting until it ends.\n")
            sys.stdout.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_machine(*, has_gpu: bool) -> None:
    """Print the requirements and the results. Raises SetupFailed if one is missing."""
    found = machine.checks(REPOSITORY, has_gpu=has_gpu)
    sys.stdout.write(f"What Anneal needs, and what this machine has:\n{machine.report(found)}")
    sys.stdout.flush()
    if missing := [check.name for check in found if check.fix]:
        raise SetupFailed(f"Set-up has not begun, because of: {', '.join(missing)}. Correct this and run it again.")


def stage(name: str, work: Callable[[], None]) -> None:
    """Run one stage and print how long it took."""
    started = time.monotonic()
    work()
    sys.stdout.write(f"  {name:<28} {time.monotonic() - started:6.1f} s\n")
    sys.stdout.flush()


def install(environment: Environment) -> None:
    """Update one environment to its locks, from scratch if it is not sound. Raises SetupFailed."""
    if environment.is_sound():
        environment.stamp_file.unlink()  # an interrupted installation starts from scratch
        _install_locks(environment)
    else:
        _install_anew(environment)
    check_torch_build(environment)
    environment.write_stamp()


def _install_anew(environment: Environment) -> None:
    """Install with this Python or else with the others on the PATH, because some lack a wheel."""
    failures: dict[str, NoWheel] = {}
    for python in _pythons():
        version = version_of(python)
        if version in failures:
            continue
        environment.make_anew(python)
        try:
            _install_locks(environment)
            return
        except NoWheel as failure:
            failures[version] = failure
    tried = "\n".join(f"Python {version}: {failure}" for version, failure in failures.items())
    raise SetupFailed(f"{tried}\nPut another Python ({machine.PYTHONS_TEXT}) on the path for {environment.name}.")


def _pythons() -> Iterator[str]:
    yield sys.executable
    yield from machine.suitable_pythons()


def _install_locks(environment: Environment) -> None:
    for locks in environment.lock_groups:
        install_locked(environment.python, locks, fallback_index=environment.fallback_index)


def check_torch_build(environment: Environment) -> None:
    """Make sure that torch, if installed, fits the machine. Raises SetupFailed."""
    found = list(environment.directory.glob("lib/python*/site-packages/torch/version.py"))
    is_cpu_build = bool(found) and re.search(r"^cuda[^=]*= None$", found[0].read_text(), re.MULTILINE) is not None
    if found and is_cpu_build is has_nvidia_gpu():
        build = "CPU" if is_cpu_build else "CUDA"
        raise SetupFailed(f"The indexes gave a {build} build of torch for {environment.name}. See `pip config list`.")


def install_command(environment: Environment) -> None:
    """Write the `anneal` command into an environment."""
    command = environment.directory / "bin/anneal"
    if not command.exists() or command.read_text() != COMMAND:
        command.write_text(COMMAND)
        command.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
