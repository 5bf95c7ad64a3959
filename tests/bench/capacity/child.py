"""The training of one machine without torch: steps that only take time, checkpoints, and an adapter made before.

    python -m tests.bench.capacity.child ADAPTER_FOLDER SPEC WORK_DIR

The machines of a group meet at the first one and wait for each other in every step, as gloo's processes do. When one is
gone, the others fail.
"""

import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from apps.contracts.addresses.machines import NodeGroup
from apps.contracts.failures import FailureCode
from apps.contracts.runs import (
    Failed,
    Manifest,
    Phase,
    PhaseChanged,
    RunSpec,
    StepCompleted,
    Stopped,
    TrainingStarted,
)
from gpu_workers.common.artifacts import folder_bytes, read_manifest, seal_folder
from gpu_workers.common.events import (
    ADAPTER_FOLDER,
    CHECKPOINTS_FOLDER,
    EVENTS_FILE,
    UNNUMBERED,
    AdapterReady,
    CheckpointReady,
    ChildOutcome,
    EventWriter,
    write_outcome,
)

STEPS, STEP_SECONDS = 30, 0.2  # of a whole job
_STEPS_BETWEEN_CHECKPOINTS = 10
_TOKENS_PER_STEP = 10
_MEETING_SECONDS = 60.0
_GO_ON, _STOP = b"g", b"s"


class PeerLost(Exception):
    """A machine of the group is gone."""


class Meeting:
    """The connections between the first machine of a group and the others; none for a machine that is alone."""

    def __init__(self, place: NodeGroup | None) -> None:
        self._peers: list[socket.socket] = []
        self._leads = place is None or place.rank == 0
        if place is None:
            return
        deadline = time.monotonic() + _MEETING_SECONDS
        try:
            if self._leads:
                self._accept(place)
            else:
                self._connect(place, deadline)
        except OSError as error:
            raise PeerLost from error

    def _accept(self, place: NodeGroup) -> None:
        with socket.create_server((place.master_address, place.master_port)) as listener:
            listener.settimeout(_MEETING_SECONDS)
            for _ in range(place.node_count - 1):
                self._peers.append(listener.accept()[0])
        for peer in self._peers:
            peer.settimeout(None)

    def _connect(self, place: NodeGroup, deadline: float) -> None:
        while not self._peers:
            with suppress(ConnectionRefusedError):
                self._peers.append(socket.create_connection((place.master_address, place.master_port)))
                return
            if time.monotonic() > deadline:
                raise PeerLost
            time.sleep(0.1)

    def agree(self, *, wants_stop: bool) -> bool:
        """Wait for all; return whether one of them wants to stop. Raises PeerLost."""
        own = _STOP if wants_stop else _GO_ON
        try:
            if self._leads:
                said = {own, *(self._receive(peer) for peer in self._peers)}
                answer = _STOP if _STOP in said else _GO_ON
                for peer in self._peers:
                    peer.sendall(answer)
                return answer == _STOP
            self._peers[0].sendall(own)
            return self._receive(self._peers[0]) == _STOP
        except OSError as error:
            raise PeerLost from error

    def _receive(self, peer: socket.socket) -> bytes:
        if not (said := peer.recv(1)):
            raise PeerLost
        return said


class Training:
    """One attempt, from the checkpoint that it resumes to its outcome."""

    def __init__(self, spec: RunSpec, work_dir: Path, adapter: Path) -> None:
        self._spec, self._work_dir, self._adapter = spec, work_dir, adapter
        self._events = EventWriter(work_dir / EVENTS_FILE)
        self._start = self._step = spec.resume_from.step if spec.resume_from else 0
        self._wants_stop = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._wants_stop = True

    def run(self) -> ChildOutcome:
        try:
            meeting = Meeting(self._spec.group)
            self._begin()
            while self._step < STEPS:
                if meeting.agree(wants_stop=self._wants_stop):
                    self._save_checkpoint()
                    return Stopped(reason="stopped", step=self._step, training_seconds=self._seconds)
                self._take_step()
            meeting.agree(wants_stop=False)
        except PeerLost:
            return Failed(code=FailureCode.WORKER_LOST, message="A machine of the group is gone.")
        return self._save_adapter()

    @property
    def _seconds(self) -> float:
        """Return the training time of this attempt."""
        return (self._step - self._start) * STEP_SECONDS

    def _begin(self) -> None:
        self._events.write(PhaseChanged(sequence=UNNUMBERED, phase=Phase.TRAINING))
        self._events.write(
            TrainingStarted(
                sequence=UNNUMBERED, total_steps=STEPS, start_step=self._start, rows=self._spec.training.rows,
                trained_tokens_per_epoch=_TOKENS_PER_STEP,
            )
        )  # fmt: skip

    def _take_step(self) -> None:
        time.sleep(STEP_SECONDS)
        self._step += 1
        self._events.write(
            StepCompleted(
                sequence=UNNUMBERED, step=self._step, total_steps=STEPS, epoch=self._step / STEPS, train_loss=1.0,
                learning_rate=1e-3, grad_norm=1.0, trained_tokens=self._step * _TOKENS_PER_STEP,
                tokens_per_second=_TOKENS_PER_STEP / STEP_SECONDS, training_seconds=self._seconds,
            )
        )  # fmt: skip
        if self._step % _STEPS_BETWEEN_CHECKPOINTS == 0 and self._step < STEPS:
            self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        folder = f"{CHECKPOINTS_FOLDER}/checkpoint-{self._step}"
        digest, size = self._seal("checkpoint", folder)
        self._events.write(
            CheckpointReady(
                sequence=UNNUMBERED, step=self._step, folder=folder, manifest_sha256=digest, bytes=size,
                trained_tokens=self._step * _TOKENS_PER_STEP, training_seconds=self._seconds,
            )
        )  # fmt: skip

    def _save_adapter(self) -> AdapterReady:
        digest, size = self._seal("adapter", ADAPTER_FOLDER)
        return AdapterReady(
            folder=ADAPTER_FOLDER, manifest_sha256=digest, bytes=size, step=self._step,
            training_seconds=self._seconds, trained_tokens=self._step * _TOKENS_PER_STEP,
        )  # fmt: skip

    def _seal(self, kind: str, folder: str) -> tuple[str, int]:
        """Copy the adapter to the folder with a manifest; return the manifest's SHA-256 and the bytes."""
        spec, step = self._spec, self._step
        temporary, final = self._work_dir / "unsealed", self._work_dir / folder
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(self._adapter, temporary)
        if kind == "checkpoint":
            (temporary / "optimizer.pt").write_bytes(b"state")
        digest = seal_folder(
            temporary,
            final,
            lambda files: Manifest(kind=kind, run_id=spec.run_id, attempt=spec.attempt, step=step, files=files),
        )
        return digest, folder_bytes(read_manifest(final))


def main() -> None:
    adapter, spec_path, work_dir = (Path(each) for each in sys.argv[1:])
    sys.stdin.readline()  # the secrets
    spec = msgspec.json.decode(spec_path.read_bytes(), type=RunSpec)
    write_outcome(work_dir, Training(spec, work_dir, adapter).run())


if __name__ == "__main__":
    main()
