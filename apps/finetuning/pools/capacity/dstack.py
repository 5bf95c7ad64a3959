"""dstack: one run of type task is one node. dstack chooses the machine in its fleets and starts the image there.

The run's name follows from the node's, and a tag holds the whole name. The one-time token is a variable of the run.
"""

import shlex
from collections.abc import Collection
from typing import Annotated, Literal

import msgspec

from apps.finetuning.pools.capacity.api_client import ApiClient, EngineRefused, decode
from apps.finetuning.pools.capacity.manifests import (
    GRACE_SECONDS,
    HOME,
    MAX_CA_CHARACTERS,
    ApiUrl,
    Image,
    job_name,
)
from apps.finetuning.pools.capacity.port import CapacityError, ListedNode, NodeRequest

_PAGE, _MAX_PAGES = 100, 10  # dstack gives at most 100 runs at once
_NODE_TAG = "anneal-node"
_RUNNING = "running"
_WAITING = ("pending", "submitted")
_ENDED = ("terminated", "failed", "done")
_SPOT_POLICIES: dict[bool | None, str] = {True: "spot", False: "on-demand"}
_TOKEN_FILE = f"{HOME}/token"
_COMMAND = (
    'umask 077; printf %s "$ANNEAL_NODE_TOKEN" > "$ANNEAL_ENROLL_TOKEN_FILE"; unset ANNEAL_NODE_TOKEN; '
    'ANNEAL_NODE_ADDRESS="$(hostname -I | cut -d " " -f 1)"; export ANNEAL_NODE_ADDRESS; '
    "exec python {arguments}"
)
_Word = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,99}\Z")]
_Gpu = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9]{0,30}(:[0-9]{1,4}GB)?\Z")]


class DstackSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Where runs go and what they ask for.

    `gpu` is a name of dstack, perhaps with a memory, such as `H100:80GB`; without it the nodes have no GPU. Without a
    `fleet` dstack chooses among all fleets of the project. `spot_policy` is that of pools whose nodes are all alike.
    """

    api_url: ApiUrl
    project: _Word
    image: Image
    ca: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CA_CHARACTERS)] | None = None
    gpu: _Gpu | None = None
    fleet: _Word | None = None
    spot_policy: Literal["on-demand", "spot", "auto"] = "on-demand"
    user_id: Annotated[int, msgspec.Meta(ge=1, le=2_000_000_000)] = 10_001  # as in deploy/images/gpu.Dockerfile
    minutes: Annotated[int, msgspec.Meta(ge=5, le=43_200)] = 1440


class _Configuration(msgspec.Struct):
    tags: dict[str, str] | None = None


class _RunSpec(msgspec.Struct):
    name: str = msgspec.field(name="run_name")
    configuration: _Configuration


class _Run(msgspec.Struct):
    id: str
    submitted_at: str
    status: str
    spec: _RunSpec = msgspec.field(name="run_spec")
    status_message: str = ""


class Dstack:
    """The adapter for one project of one dstack server."""

    def __init__(self, settings: DstackSettings, *, token: str) -> None:
        self._settings = settings
        self._client = ApiClient(url=settings.api_url, ca=settings.ca, token=token)

    def request(self, node: NodeRequest) -> str:
        name = job_name(node.name)
        body = {"plan": {"run_spec": {"run_name": name, "configuration": self._task(name, node)}}, "force": False}
        # Not forced: dstack refuses to change a run of this name that has not ended.
        try:
            self._client.call("POST", self._path("apply"), body=body, hidden=node.token)
        except EngineRefused:
            raise
        except CapacityError:
            self.release(external_ids=[name])
            raise
        return name

    def list_nodes(self, *, prefix: str) -> dict[str, ListedNode]:
        listed = {}
        for run in self._active_runs():
            name = (run.spec.configuration.tags or {}).get(_NODE_TAG, "")
            is_ours = name.startswith(prefix) and job_name(name) == run.spec.name
            if is_ours and run.status not in _ENDED:
                shown = "" if run.status == _RUNNING else (run.status_message or run.status).capitalize()
                listed[name] = ListedNode(
                    external_id=run.spec.name, reason=shown[:200], is_waiting=run.status in _WAITING
                )
        return listed

    def release(self, *, external_ids: Collection[str]) -> None:
        # Names without a run are no error. Not aborted: the worker gets a signal, and time.
        body = {"runs_names": sorted(external_ids), "abort": False}
        self._client.call("POST", self._path("stop"), body=body)

    def _path(self, verb: str) -> str:
        return f"/api/project/{self._settings.project}/runs/{verb}"

    def _active_runs(self) -> list[_Run]:
        """Return the project's runs that have not ended, of other users too."""
        found: list[_Run] = []
        body: dict[str, object] = {
            "project_name": self._settings.project, "only_active": True, "include_jobs": False, "limit": _PAGE,
        }  # fmt: skip
        for _ in range(_MAX_PAGES):
            page = decode(self._client.call("POST", "/api/runs/list", body=body), list[_Run])
            found += page
            if len(page) < _PAGE:
                return found
            body |= {"prev_submitted_at": page[-1].submitted_at, "prev_run_id": page[-1].id}
        raise CapacityError("dstack lists too many active runs: use a project of its own for the nodes.")

    def _task(self, name: str, node: NodeRequest) -> dict[str, object]:
        """Return the task. It is repeated only before it has a machine: after that its token was used."""
        settings = self._settings
        gpu: dict[str, object] = {"count": 0}
        if settings.gpu:
            kind, _, memory = settings.gpu.partition(":")
            gpu = {"name": [kind], "count": node.gpus} | ({"memory": memory} if memory else {})
        task: dict[str, object] = {
            "type": "task", "name": name, "image": settings.image, "user": str(settings.user_id),
            "entrypoint": "/bin/sh -c", "commands": [_COMMAND.format(arguments=shlex.join(node.arguments))],
            "working_dir": "/srv/anneal",
            "env": {
                **node.variables, "ANNEAL_WORK_DIR": f"{HOME}/{node.kind}",
                "ANNEAL_ENROLL_TOKEN_FILE": _TOKEN_FILE, "ANNEAL_NODE_TOKEN": node.token,
            },
            # With the architecture, dstack's server need not read the image's registry.
            "resources": {"cpu": {"arch": "x86"}, "gpu": gpu},
            "spot_policy": _SPOT_POLICIES.get(node.is_spot, settings.spot_policy),
            "retry": {"on_events": ["no-capacity"], "duration": settings.minutes * 60},
            "max_duration": settings.minutes * 60, "stop_duration": GRACE_SECONDS,
            "tags": {_NODE_TAG: node.name},
        }  # fmt: skip
        if settings.fleet:
            task["fleets"] = [settings.fleet]
        return task
