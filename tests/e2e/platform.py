"""The whole platform as a customer and a saboteur see it: public interfaces, and kill -9."""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xmlrpc.client import ServerProxy

import httpx
import openai
from supervisor.xmlrpc import SupervisorTransport

from gpu_workers.common.process_tree import die_with_parent
from gpu_workers.trainer.children.executor import PID_FILE

ROOT = Path(__file__).resolve().parents[2]
BANKING = ROOT / "demo" / "banking77" / "train.csv"
WALL = Path(__file__).with_name("wall")
START_SECONDS = 240
TERMINAL = ("succeeded", "failed", "cancelled")


def until(look: Callable[[], Any], seconds: float, complaint: str) -> Any:
    """Return the first true answer of `look`; fail with `complaint` after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(1.0)
    raise AssertionError(f"{complaint} within {seconds:.0f} s")


def _confine() -> None:
    """Let the process about to start end with this test run, and have two cores.

    A trainer takes one thread then, however busy the others are: only with as many as before a resume is bit-exact.
    """
    die_with_parent(signal.SIGINT)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


class Platform:
    """Every process, started by the same launcher as `make demo`, in a data directory of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._log = (home / "launch.log").open("w")
        self.objects = home / "objects"
        # The workers cannot open what lies in the object store's folder (wall/sitecustomize.py).
        self.environment = {**os.environ, "PYTHONPATH": str(WALL), "HIDDEN_FOLDER": str(self.objects)}
        command = [sys.executable, "-m", "scripts.launch", "--home", str(home), "--no-main-job"]
        self._launcher = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            preexec_fn=_confine,
        )
        until(self._is_ready, START_SECONDS, f"the platform did not start ({home / 'launch.log'})")
        if not (home / "demo.json").exists():
            self._make_account()
        self.account = account = json.loads((home / "demo.json").read_text())
        self.url = json.loads((home / "ready.json").read_text())["public_url"]
        self.model, self.pool = account["base_model"], account["pool"]
        # Not through a proxy that the environment may name: the platform is on loopback.
        http_client = openai.DefaultHttpxClient(trust_env=False)
        self.client = openai.OpenAI(
            api_key=account["api_key"], base_url=f"{self.url}/v1", max_retries=6, http_client=http_client
        )
        headers = {"Authorization": f"Bearer {account['api_key']}"}
        self.native = httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=30, trust_env=False)

    def _is_ready(self) -> bool:
        if self._launcher.poll() is not None:
            raise AssertionError((self.home / "launch.log").read_text()[-4000:])
        return (self.home / "ready.json").exists()

    def _make_account(self) -> None:
        """On external services there is no demonstration: make its account as an operator would, by hand."""
        program = (
            "from pathlib import Path; from apps.core.database.clock import db_now;"
            "from apps.interfaces.staff.management.seeding import seed_account;"
            f" seed_account(home=Path({str(self.home)!r}), now=db_now())"
        )
        command = f'set -a; . {self.home}/env; set +a; exec {sys.executable} manage.py shell -c "$PROGRAM"'
        subprocess.run(["sh", "-c", command], cwd=ROOT, env=self.environment | {"PROGRAM": program}, check=True)

    def stop(self) -> int:
        """Stop it as Ctrl-C does and return the launcher's exit code: 0 means that no process was left."""
        self.client.close()
        self.native.close()
        self._launcher.send_signal(signal.SIGINT)
        code = self._launcher.wait(timeout=180)
        self._log.close()
        return code

    # --- as a customer ------------------------------------------------------------------------------------------

    def upload(self, rows: int) -> str:
        lines = "".join(chat_rows(BANKING, rows))
        created = self.client.files.create(file=("rows.jsonl", lines.encode()), purpose="fine-tune")
        checked = self.client.files.wait_for_processing(created.id, poll_interval=0.3, max_wait_seconds=240)
        assert checked.status == "processed", checked
        return checked.id

    def wait_until_quotable(self, file_id: str) -> None:
        """The first worker measures its own speed before anything can be launched."""

        def look() -> bool:
            body = {"model": self.model, "training_file": file_id}
            answer = self.native.post("/estimates", json=body)
            return answer.status_code == 200 and any(pool["is_launchable"] for pool in answer.json()["pools"])

        until(look, 300, "no pool became launchable")

    def price_usd_per_second(self, file_id: str) -> float:
        """Return what a GPU second of the pool costs, as an estimate shows it."""
        answer = self.native.post("/estimates", json={"model": self.model, "training_file": file_id})
        pool = next(pool for pool in answer.raise_for_status().json()["pools"] if pool["pool"] == self.pool)
        return float(pool["price_usd_per_hour"]) / 3600

    def create_job(self, file_id: str, *, epochs: int, **extra: Any) -> str:
        # Far above the quote: a busy machine makes a job dearer, and being paused for that is another test's matter.
        budget = {"max_cost_usd": 1.0}
        body = {"compute": {"pool": self.pool}, "recipe": {"epochs": epochs}, "budget": budget} | extra
        return self.client.fine_tuning.jobs.create(model=self.model, training_file=file_id, extra_body=body).id

    def job(self, job_id: str) -> Any:
        return self.client.fine_tuning.jobs.retrieve(job_id)

    def messages(self, job_id: str) -> list[str]:
        return [event.message for event in self.client.fine_tuning.jobs.list_events(job_id, limit=100)]

    def wait_for_end(self, job_id: str, seconds: float = 600) -> Any:
        return until(lambda: self._ended(job_id), seconds, f"{job_id} did not end")

    def _ended(self, job_id: str) -> Any:
        job = self.job(job_id)
        return job if job.status in TERMINAL else None

    def ask(self, model: str, text: str = "Where is my card?") -> str:
        reply = self.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=24
        )
        return reply.choices[0].message.content or ""

    def wait_until_answers(self, model: str, seconds: float = 120) -> str:
        def look() -> str | None:
            try:
                return self.ask(model) or "(nothing)"
            except openai.APIError:
                return None

        return until(look, seconds, f"{model} did not answer")

    def billing(self) -> dict[str, Any]:
        return self.native.get("/billing").raise_for_status().json()

    def wait_for_settled_books(self) -> dict[str, Any]:
        return until(self._settled, 120, "usage was not rated")

    def _settled(self) -> dict[str, Any] | None:
        bill = self.billing()
        return None if bill["unrated_requests"] else bill

    # --- as a saboteur ------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """Return the process id of a supervised program now; 0 when it is down."""
        socket = find_socket(self.home)
        proxy = ServerProxy("http://localhost", transport=SupervisorTransport(None, None, f"unix://{socket}"))
        with proxy:
            programs = proxy.supervisor.getAllProcessInfo()
        return next(program["pid"] for program in programs if program["name"] == name)

    def kill(self, name: str) -> int:
        """kill -9 a program, or for `training-child` the trainer's child; return the pid that died."""
        pid = self._training_child() if name == "training-child" else self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def answers(self) -> bool:
        """Return whether the web server and the database answer a customer."""
        try:
            return self.native.get("/me").is_success
        except httpx.TransportError:
            return False

    def pause(self, job_id: str) -> None:
        """Pause a job that trains. Its child stands still until it is told, or a fast machine would finish before."""
        child = self._training_child()
        os.kill(child, signal.SIGSTOP)
        try:
            self.client.fine_tuning.jobs.pause(job_id)
            until(lambda: is_pending(child, signal.SIGTERM), 60, "the child is not told to stop")
        finally:
            os.kill(child, signal.SIGCONT)

    def _training_child(self) -> int:
        records = until(lambda: list(self.home.glob(f"trainer/runs/*-*/{PID_FILE}")), 30, "no training child")
        return int(json.loads(records[0].read_text())["pid"])


def find_socket(home: Path) -> Path:
    """Return the supervisor's socket: in the data directory, or where its configuration says."""
    for line in (home / "supervisord.conf").read_text().splitlines():
        if line.startswith(("file=", "file =")):
            return Path(line.partition("=")[2].strip())
    raise AssertionError("supervisord.conf names no socket")


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Return whether a signal was sent to a process that has not handled it yet."""
    status = _read(Path(f"/proc/{pid}/status"))
    return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) >> (number - 1) & 1)


def find_processes(words: str, home: Path) -> list[int]:
    """Return the processes of this data directory whose command line holds `words`."""
    found = []
    for entry in Path("/proc").iterdir():
        command = _read(entry / "cmdline") if entry.name.isdigit() else ""
        if words in command and str(home) in _read(entry / "environ") + command:
            found.append(int(entry.name))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def chat_rows(path: Path, count: int) -> list[str]:
    """Return the first rows of a banking77 file as lines of a training file."""
    with path.open(newline="") as file:
        return [_chat_row(row) for row in itertools.islice(csv.DictReader(file), count)]


def _chat_row(row: dict[str, str]) -> str:
    messages = [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row["category"]}]
    return json.dumps({"messages": messages}) + "\n"
