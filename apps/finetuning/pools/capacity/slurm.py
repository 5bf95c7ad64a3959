"""Slurm: one batch job is one node. Names and scripts are made here, and no shell reads a setting unquoted.

The one-time token is in the script, which sbatch reads from standard input and Slurm stores for its own user only.
"""

import shlex
import subprocess
from collections.abc import Collection
from typing import Annotated

import msgspec

from apps.finetuning.pools.capacity.port import CapacityError, ListedNode, NodeRequest

_SECONDS = 8.0  # for one command
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:-]{0,99}$|^$")]
_Path = Annotated[str, msgspec.Meta(pattern=r"^/[A-Za-z0-9_./-]{1,199}$")]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin"
_SCRIPT = """#!/bin/sh
umask 077
mkdir -p {work_dir} || exit 1
printf %s {token} > {work_dir}/token
export {variables}
export ANNEAL_WORK_DIR={work_dir} ANNEAL_ENROLL_TOKEN_FILE={work_dir}/token
export ANNEAL_BASE_MODEL_ROOTS={model_root} ANNEAL_NODE_ADDRESS="$(hostname)"
{python} {arguments} &
worker=$!
trap 'kill -TERM $worker' TERM
wait $worker
status=$?
while kill -0 $worker 2> /dev/null; do  # a signal ended the wait: the worker still saves
    wait $worker
    status=$?
done
rm -rf {work_dir}
exit $status
"""


class SlurmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Where jobs go, and where Anneal lies on the nodes.

    `spot_partition` and `spot_qos` are those of spot nodes in a pool that has both kinds; empty: as of the others.
    `model_root` holds base models that are not from the hub. `slurm_conf` lies where Celery runs; it is needed if there
    are several clusters.
    """

    partition: _Name
    install_dir: _Path
    work_dir: _Path
    account: _Name = ""
    qos: _Name = ""
    spot_partition: _Name = ""
    spot_qos: _Name = ""
    gres: _Name = ""  # of one node, such as gpu:h100:2
    minutes: Annotated[int, msgspec.Meta(ge=5, le=43_200)] = 1440
    model_root: _Path | None = None
    slurm_conf: _Path | None = None


class Slurm:
    """The adapter for one cluster."""

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings

    def request(self, node: NodeRequest) -> str:
        settings = self._settings
        partition = (settings.spot_partition if node.is_spot else "") or settings.partition
        qos = (settings.spot_qos if node.is_spot else "") or settings.qos
        arguments = [
            "--parsable",
            f"--job-name={node.name}",
            f"--partition={partition}",
            f"--time={settings.minutes}",
            "--signal=B:TERM@120",  # before the time limit: a worker saves and uploads within 110 seconds
            f"--chdir={settings.install_dir}",
            "--nodes=1",
            "--ntasks=1",
            "--no-requeue",  # a repeated script has a token that was used
            "--export=ALL",  # of the few variables below
            "--output=/dev/null",
        ]
        arguments += [f"--account={settings.account}"] if settings.account else []
        arguments += [f"--qos={qos}"] if qos else []
        arguments += [f"--gres={settings.gres}"] if settings.gres else []
        work_dir = f"{settings.work_dir}/{node.name.split('-')[-1]}"  # short: a socket's path has 107 characters
        script = _SCRIPT.format(
            work_dir=shlex.quote(work_dir),
            token=shlex.quote(node.token),
            variables=" ".join(f"{name}={shlex.quote(value)}" for name, value in node.variables.items()),
            model_root=shlex.quote(settings.model_root or ""),
            python=shlex.quote(f"{settings.install_dir}/.venv-engines/bin/python"),
            arguments=shlex.join(node.arguments),
        )
        return self._run("sbatch", *arguments, script=script).strip().split(";")[0]

    def list_nodes(self, *, prefix: str) -> dict[str, ListedNode]:
        lines = self._run("squeue", "--me", "--all", "--noheader", "--format=%i|%j|%T|%r").splitlines()
        listed = {}
        for line in lines:
            external_id, name, state, reason = line.split("|", 3)
            if name.startswith(prefix):
                waits = "" if state == "RUNNING" or reason == "None" else f"{state.capitalize()}: {reason}"
                listed[name] = ListedNode(external_id=external_id, reason=waits[:200], is_waiting=state == "PENDING")
        return listed

    def release(self, *, external_ids: Collection[str]) -> None:
        self._run("scancel", "--quiet", *sorted(external_ids))

    def _run(self, program: str, *arguments: str, script: str = "") -> str:
        environment = {"PATH": _PATH, "LC_ALL": "C.UTF-8"}
        if self._settings.slurm_conf:
            environment["SLURM_CONF"] = self._settings.slurm_conf
        try:
            done = subprocess.run(  # a list of our own arguments
                [program, *arguments], input=script, env=environment, capture_output=True, text=True, timeout=_SECONDS,
                check=False, errors="replace",
            )  # fmt: skip
        except FileNotFoundError as error:
            raise CapacityError(f"{program} is not installed where Celery runs.") from error
        except subprocess.TimeoutExpired as error:
            raise CapacityError(f"{program} did not end within {_SECONDS:g} seconds.") from error
        if done.returncode:
            said = " ".join(done.stderr.split())[:200]
            raise CapacityError(f"{program} failed: {said or done.returncode}")
        return done.stdout
