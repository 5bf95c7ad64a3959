"""vLLM as one unit that can be killed: `python -m gpu_workers.engine.launcher [canary]`.

    launcher (what the supervisor sees)  >  keeper  >  API process  >  EngineCore (and its workers)

vLLM's own processes outlive a killed parent and keep their memory. Launcher and keeper are both subreapers: if one
dies, the other finds every orphan among its descendants and kills it. When the API process ends for any reason, the
keeper kills the rest, and the launcher exits so that its supervisor starts everything again. If both are killed at
once, the next launcher finds the remaining processes by the numbers and start times in the state file.
"""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpu_workers.common.base_models import HUB_PATTERNS, find_damaged, repair
from gpu_workers.common.config import EngineConfig, downloading_environment, read_engine_config
from gpu_workers.common.files import PRIVATE, replace_file
from gpu_workers.common.process_tree import (
    Process,
    become_subreaper,
    die_with_parent,
    identify,
    is_alive,
    kill_all,
    kill_descendants,
    list_descendants,
    list_session,
    read_command,
    read_title,
    reap_children,
)
from gpu_workers.engine.command import build_command, build_environment, hash_settings
from gpu_workers.engine.health import count_requests, is_listening
from gpu_workers.engine.state import EnginePaths, EngineState, ReplicaBase, read_engine_state, read_parts

log = logging.getLogger("anneal.engine")

_HANDLED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    """Run as the launcher, or as the keeper that it starts, for the replica's engine or its canary engine."""
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr, level=logging.INFO)
    is_canary = sys.argv[1:2] == ["canary"]
    arguments = sys.argv[2:] if is_canary else sys.argv[1:]
    config = read_engine_config(is_canary=is_canary)
    paths = EnginePaths(config.work_dir)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    become_subreaper()
    if arguments[:1] == ["keeper"]:
        return _keep(config, paths, model_path=arguments[1], base=msgspec.json.decode(arguments[2], type=ReplicaBase))
    return _launch(config, paths)


# --- launcher ---------------------------------------------------------------------------------------------------


def _launch(config: EngineConfig, paths: EnginePaths) -> int:
    paths.folder.mkdir(parents=True, exist_ok=True)
    paths.folder.chmod(0o700)  # vLLM makes its socket world-accessible: the folder protects it
    with open(paths.folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.error("another launcher runs in %s", paths.folder)
            return 3
        _kill_leftovers(paths)
        base = _wait_for_base(config, paths)
        if base is None:
            return 0
        return _run_keeper(config, paths, base)


def _kill_leftovers(paths: EnginePaths) -> None:
    """Kill the processes that an earlier launcher and keeper left when both were killed."""
    state = read_engine_state(paths)
    if state is not None:
        for _ in range(400):
            leftovers = [p for p in (state.launcher, state.keeper) if is_alive(p)] + list_session(state.keeper)
            if not leftovers:
                break
            kill_all(leftovers)
            time.sleep(0.02)
        else:
            raise RuntimeError(f"processes of the last engine do not die: {leftovers}")
    paths.socket.unlink(missing_ok=True)
    paths.restart_request.unlink(missing_ok=True)
    paths.parts.unlink(missing_ok=True)


def _wait_for_base(config: EngineConfig, paths: EnginePaths) -> ReplicaBase | None:
    """Return the base model to serve once the agent has enrolled; None if asked to stop before."""
    if config.base_model_path:
        return ReplicaBase(served_name=config.served_name, path=config.base_model_path)
    while True:
        try:
            return msgspec.json.decode(paths.replica.read_bytes(), type=ReplicaBase)
        except FileNotFoundError:
            received = signal.sigtimedwait(_HANDLED, 0.5)
            if received is not None and received.si_signo in _STOPPING:
                return None


def _run_keeper(config: EngineConfig, paths: EnginePaths, base: ReplicaBase) -> int:
    model_path = _resolve_model(base)
    settings_sha256 = hash_settings(config, base, model_path=model_path)
    base = msgspec.structs.replace(base, files_sha256={}, hub_token=None)  # command lines are public
    role = ["canary"] if config.is_canary else []
    keeping = ["keeper", model_path, msgspec.json.encode(base).decode()]
    command = [sys.executable, "-m", "gpu_workers.engine.launcher", *role, *keeping]
    keeper = _start(command, environment=None)
    identity = identify(keeper.pid)
    if identity is None:
        return 1
    generation = f"{int(time.time()):x}-{keeper.pid}"
    state = EngineState(
        generation=generation,
        served_name=base.served_name,
        model_path=model_path,
        launcher=Process(os.getpid(), _require(identify(os.getpid())).started_ticks),
        keeper=identity,
        max_loras=config.max_loras if base.has_adapters else 0,
        max_lora_rank=config.max_lora_rank if base.has_adapters else 0,
        max_cpu_loras=config.max_cpu_loras if base.has_adapters else 0,
        settings_sha256=settings_sha256,
    )
    replace_file(paths.state, msgspec.json.encode(state), mode=PRIVATE)
    log.info("engine %s of %s starting", generation, base.served_name)
    is_wanted_down = _make_restart_check(paths, generation)
    return _supervise(keeper.pid, get_drain_seconds=lambda: config.drain_seconds + 15, is_wanted_down=is_wanted_down)


def _make_restart_check(paths: EnginePaths, generation: str) -> Callable[[bool], bool]:
    def is_restart_requested(_is_draining: bool) -> bool:
        try:
            return paths.restart_request.read_text() == generation
        except FileNotFoundError:
            return False

    return is_restart_requested


def _resolve_model(base: ReplicaBase) -> str:
    """Return the local folder of the base model. Downloads the pinned revision of a hub repository.

    Damaged files are downloaded again, once. Raises RuntimeError if a file stays damaged.
    """
    if base.path:
        return base.path
    if not base.repo:
        raise ValueError("replica.json names neither a path nor a repository")
    folder = _download(base)
    if repair(Path(folder), base.files_sha256, lambda: _download(base)):
        log.warning("damaged files of %s were downloaded again", base.repo)
        if damaged := find_damaged(Path(folder), base.files_sha256):
            raise RuntimeError(f"{damaged[0]} of {base.repo} is not the file that was installed")
    return folder


def _download(base: ReplicaBase) -> str:
    revision = ["--revision", base.revision] if base.revision else []
    command = [str(Path(sys.executable).with_name("hf")), "download", str(base.repo), *revision, "--quiet"]
    command += [word for pattern in sorted(base.files_sha256) or HUB_PATTERNS for word in ("--include", pattern)]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    try:
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=downloading_environment(base.hub_token)
        )
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    return done.stdout.strip().splitlines()[-1]


# --- keeper -----------------------------------------------------------------------------------------------------


def _keep(config: EngineConfig, paths: EnginePaths, *, model_path: str, base: ReplicaBase) -> int:
    """Run the API process; stop it at once when the launcher is gone."""
    launcher = os.getppid()
    command = build_command(config, base, model_path=model_path, paths=paths)
    api = _start(command, environment=build_environment(config), is_session_leader=False)
    parts = EngineParts(api.pid, paths)
    return _supervise(
        api.pid,
        get_drain_seconds=lambda: config.drain_seconds + 5 if is_listening(paths.socket) else 0,
        is_wanted_down=lambda is_draining: os.getppid() != launcher or (not is_draining and parts.has_lost_one()),
        is_drained=lambda: count_requests(paths.socket) == 0,
    )


class EngineParts:
    """The permanent processes of vLLM: EngineCore and workers.

    The API process can take 13 s to exit after one of them was killed, and longer during its start. Forked processes
    are read from a file, because they can die before they are looked for. With such a file, no others are looked for.
    Short-lived helpers (compilers, probes of the machine) are not parts.
    """

    _EAGER_SECONDS = 300.0  # parts appear within the first minutes; afterwards an occasional check is enough
    _SCAN_SECONDS = 10.0
    _GRACE_SECONDS = 2.0  # for the API process to notify its clients and exit by itself

    def __init__(self, api_pid: int, paths: EnginePaths) -> None:
        self._api_pid, self._paths = api_pid, paths
        self._known: set[Process] = set()
        self._born_at = self._scanned_at = time.monotonic()
        self._missing_since: float | None = None

    def has_lost_one(self) -> bool:
        now = time.monotonic()
        recorded = read_parts(self._paths)
        self._known.update(recorded)
        is_due = now - self._born_at < self._EAGER_SECONDS or now - self._scanned_at > self._SCAN_SECONDS
        if is_due and not recorded:  # to look for them reads all of /proc
            self._scanned_at = now
            self._known.update(p for p in list_descendants(self._api_pid, with_zombies=True) if _is_part(p))
        if all(is_alive(part) for part in self._known):
            return False
        if self._missing_since is None:
            self._missing_since = now
        return now - self._missing_since > self._GRACE_SECONDS


def _is_part(process: Process) -> bool:
    """Return whether this is a permanent process of vLLM, by its title or, before it has one, by how it was spawned."""
    return read_title(process).startswith("VLLM::") or "multiprocessing.spawn" in read_command(process)


# --- shared by both ---------------------------------------------------------------------------------------------


def _start(
    command: list[str], *, environment: dict[str, str] | None, is_session_leader: bool = True
) -> subprocess.Popen[bytes]:
    """Start a child that the kernel signals if this process dies: SIGHUP for the keeper, SIGKILL for the API."""
    death_signal = signal.SIGHUP if is_session_leader else signal.SIGKILL
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(death_signal)
        if not is_session_leader:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        if os.getppid() != parent:  # the parent died before the request was made
            os._exit(1)

    return subprocess.Popen(
        command, env=environment, start_new_session=is_session_leader, preexec_fn=prepare, stdin=subprocess.DEVNULL
    )


def _supervise(
    child: int,
    *,
    get_drain_seconds: Callable[[], float],
    is_wanted_down: Callable[[bool], bool],
    is_drained: Callable[[], bool] = lambda: False,
) -> int:
    """Wait for the child, then end every descendant. Returns 0 only after a requested stop.

    Once drained, do not wait for vLLM's own exit, which takes 10 to 16 s.
    """
    stop_before: float | None = None
    code: int | None = None
    times_drained = 0
    while code is None and times_drained < 2:
        received = signal.sigtimedwait(_HANDLED, 1.0 if stop_before is None else 0.2)
        if received is not None and received.si_signo in _STOPPING and stop_before is None:
            stop_before = time.monotonic() + get_drain_seconds()
            os.kill(child, signal.SIGTERM)
        code = reap_children().get(child)
        is_overdue = stop_before is not None and time.monotonic() > stop_before
        if is_overdue or is_wanted_down(stop_before is not None):
            break
        times_drained = times_drained + 1 if stop_before is not None and is_drained() else 0
    survivors = kill_descendants(os.getpid())
    if survivors:
        log.error("could not kill %s", survivors)
    log.info("child %d ended with %s; %d processes left", child, code, len(survivors))
    return 0 if stop_before is not None and not survivors else 1


def _require(process: Process | None) -> Process:
    if process is None:
        raise RuntimeError("a process cannot find itself in /proc")
    return process


if __name__ == "__main__":
    sys.exit(main())
