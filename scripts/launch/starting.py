"""The start of all programs in order, and the messages until they answer."""

import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import Executor, Future

from apps.contracts.addresses.networks import is_loopback
from scripts.environment import Prepared
from scripts.launch.health import health_check
from scripts.processes import REPOSITORY, Program, Tier
from scripts.supervision import LAUNCH_MARK, LaunchFailed, Supervision, end_with_launcher

MANAGE = (str(REPOSITORY / ".venv/bin/python"), "manage.py")
START_SECONDS = {
    Tier.SERVICES: 60.0,
    Tier.WEB: 120.0,
    Tier.CONTROL: 120.0,
    Tier.SERVING: 300.0,
    Tier.TRAINING: 60.0,
}


class Starting:
    """The programs that do not answer yet; prints a line with the seconds since the start when one begins to answer."""

    def __init__(self, prepared: Prepared, supervision: Supervision, *, checks: Executor) -> None:
        """Create the state of a start. Each check has its own thread in `checks`, so a slow one delays no other."""
        self.prepared, self.supervision = prepared, supervision
        self.began_at = time.time()
        self.seconds: dict[str, float] = {}
        self._checks = checks
        self._missing: dict[Program, Future[bool]] = {}
        self._late_at: dict[Program, float] = {}
        self._started: set[Tier] = set()

    def start(self, tier: Tier) -> None:
        """Start the programs of `tier` and expect them to answer. A second call for the same tier does nothing.

        supervisord refuses a group without programs. With external services, there are none to start here.
        """
        programs = [program for program in self.prepared.programs if program.tier is tier]
        if tier in self._started or not programs:
            return
        self._started.add(tier)
        self.supervision.start_tier(tier)
        for program in programs:
            self._missing[program] = self._ask(program)
            self._late_at[program] = time.monotonic() + START_SECONDS[tier]

    def _ask(self, program: Program) -> Future[bool]:
        return self._checks.submit(health_check(self.prepared, self.supervision, program))

    def update(self) -> bool:
        """Return whether every started program answers now. Raises LaunchFailed if supervisord has ended."""
        self.supervision.check()
        for program, check in list(self._missing.items()):
            if not check.done():
                continue
            if check.result():
                del self._missing[program]
                known = self.prepared.known
                addresses = {"web": self.prepared.public_url, "internal": known["ANNEAL_INTERNAL_URL"]}
                self.line(program.name, addresses.get(program.name, "is up"))
            else:
                self._missing[program] = self._ask(program)
        return not self._missing

    def wait(self) -> None:
        """Return once all programs answer. Raises LaunchFailed with a log."""
        while not self.update():
            if late := self._find_late():
                raise LaunchFailed(f"{late.name} did not become healthy{self.supervision.tail(late.name)}")
            time.sleep(0.1)

    def watch(self) -> bool:
        """Return whether every process answers. Report a late one once, and write ready.json when all answer."""
        is_up, ready_file = self.update(), self.prepared.home / "ready.json"
        if late := self._find_late():
            log = self.supervision.logs / f"{late.name}.log"
            say(f"{late.name} does not answer after {START_SECONDS[late.tier]:.0f} s. Everything else runs. Log: {log}")
        if is_up and not ready_file.exists():
            pids = {name: info["pid"] for name, info in self.supervision.states().items()}
            ready = {"public_url": self.prepared.public_url, "launcher": os.getpid(), "pids": pids}
            ready_file.write_text(json.dumps(ready, indent=1) + "\n")
        return is_up

    def _find_late(self) -> Program | None:
        """Return a program that is late. Each is returned once per period of its start-up limit."""
        for program in self._missing:
            if time.monotonic() > self._late_at[program]:
                self._late_at[program] = time.monotonic() + START_SECONDS[program.tier]
                return program
        return None

    @property
    def is_up(self) -> bool:
        """Return whether all programs were started and have answered."""
        return {program.name for program in self.prepared.programs} <= self.seconds.keys()

    def line(self, name: str, note: str) -> None:
        self.seconds[name] = round(time.time() - self.began_at, 1)
        clear = "\r\033[K" if sys.stdout.isatty() else ""  # clears the main job's bar
        say(f"{clear}{self.seconds[name]:7.1f} s  {name:<17} {note}")


def bring_up(starting: Starting) -> None:
    """Return once the control plane answers, while the engine and the trainer start.

    The trainer measures its speed when the engine has loaded and the machine is quiet.

    Raises LaunchFailed with the log of a process that does not answer.
    """
    prepared = starting.prepared
    say(f"Starting Anneal; its data is in {prepared.home}. The dashboard opens within about half a minute.")
    for note in prepared.notes:
        say(note)
    starting.supervision.start()
    starting.start(Tier.SERVICES)
    starting.wait()
    _prepare_data(prepared)
    starting.line("database", "tables, static files, catalogue and demo account are ready")
    starting.start(Tier.WEB)
    starting.wait()
    say(_sign_in(prepared))
    starting.start(Tier.CONTROL)
    starting.wait()
    starting.start(Tier.SERVING)
    starting.start(Tier.TRAINING)


def _prepare_data(prepared: Prepared) -> None:
    """Migrate, collect changed static files and seed, in one process. Raises LaunchFailed."""
    command = ["prepare", "--demo" if has_demo(prepared) else "--local", "--verbosity", "0"]
    environment = {**os.environ, **prepared.management_variables(role="owner"), LAUNCH_MARK: str(prepared.home)}
    done = subprocess.run(
        [*MANAGE, *command],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=end_with_launcher,
    )
    if done.returncode:
        raise LaunchFailed(f"manage.py prepare failed:\n{(done.stdout + done.stderr).strip()[-3000:]}")


def has_demo(prepared: Prepared) -> bool:
    """Return whether this launch creates the demo's operator account.

    It does so only if no other machine can reach it.
    """
    return prepared.services is not None and is_loopback(prepared.public_url)


def _sign_in(prepared: Prepared) -> str:
    if not has_demo(prepared):
        env = shlex.quote(str(prepared.home / "env"))
        return (
            f"\n  The dashboard is open:  {prepared.public_url}\n"
            "  There is no demo account: others can reach this installation or its database. Make an operator with\n"
            f"  set -a; . {env}; set +a; {MANAGE[0]} manage.py createoperator you@example.com\n"
        )
    account = json.loads((prepared.home / "demo.json").read_text())
    return (
        f"\n  The dashboard is open:  {prepared.public_url}\n"
        f"  Sign in as              {account['email']}\n"
        f"  with the password       {account['password']}\n"
    )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
