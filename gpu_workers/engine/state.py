"""Files in a shared folder through which an engine's launcher and the serving agent communicate."""

from pathlib import Path

import msgspec

from gpu_workers.common.process_tree import Process


class ReplicaBase(msgspec.Struct, frozen=True, kw_only=True):
    """The model to serve; the serving agent writes it at enrolment (`replica.json`)."""

    served_name: str
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    files_sha256: dict[str, str] = {}  # of a hub's files, which the launcher checks
    hub_token: str | None = None  # for the launcher alone
    has_adapters: bool = True  # False: a merged or fully trained model, served alone


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's report to the agent and to the next launcher. `generation` changes with each start."""

    generation: str
    served_name: str
    model_path: str
    launcher: Process
    keeper: Process
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int = 0
    settings_sha256: str = ""  # of what may change its numbers, see `hash_settings`; "" of an older launcher


class EnginePaths(msgspec.Struct, frozen=True):
    """The folder (mode 0700) that launcher and agent share."""

    work_dir: Path

    @property
    def folder(self) -> Path:
        return self.work_dir / "engine"

    @property
    def socket(self) -> Path:
        return self.folder / "vllm.sock"

    @property
    def state(self) -> Path:
        return self.folder / "state.json"

    @property
    def parts(self) -> Path:
        """Return the file of the processes that vLLM has forked, one per line."""
        return self.folder / "parts.jsonl"

    @property
    def restart_request(self) -> Path:
        """Return the file of the generation that must end. The agent writes it, possibly from another container."""
        return self.folder / "restart"

    @property
    def replica(self) -> Path:
        return self.work_dir / "replica.json"


def read_engine_state(paths: EnginePaths) -> EngineState | None:
    """Return the state that the running or last launcher wrote, or None before the first start."""
    try:
        return msgspec.json.decode(paths.state.read_bytes(), type=EngineState)
    except FileNotFoundError:
        return None


def record_part(file: Path, part: Process) -> None:
    with open(file, "ab", buffering=0) as lines:
        lines.write(msgspec.json.encode(part) + b"\n")


def read_parts(paths: EnginePaths) -> list[Process]:
    """Return the processes that vLLM has forked; none if it spawns them."""
    try:
        return msgspec.json.Decoder(Process).decode_lines(paths.parts.read_bytes())
    except FileNotFoundError:
        return []
