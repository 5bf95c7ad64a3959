"""Kubernetes: one Indexed Job is one node. Kueue, if it is there, queues the Job by its label.

The one-time token is in a Secret that the Job owns. The Role in deploy/kubernetes/access.yaml allows what the adapter
does, and no more.
"""

import time
from collections.abc import Collection

import msgspec

from apps.finetuning.pools.capacity.api_client import ApiClient, EngineRefused, decode
from apps.finetuning.pools.capacity.manifests import (
    NAME_ANNOTATION,
    POOL_LABEL,
    KubernetesSettings,
    job_manifest,
    job_name,
    secret_manifest,
)
from apps.finetuning.pools.capacity.port import CapacityError, ListedNode, NodeRequest

_RELEASE_SECONDS = 30.0  # for all that one call releases
_PAGE, _MAX_PAGES = 500, 4


class _Meta(msgspec.Struct):
    name: str
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Condition(msgspec.Struct):
    type: str
    value: str = msgspec.field(name="status")
    message: str = ""


class _ContainerWait(msgspec.Struct):
    reason: str = ""


class _ContainerState(msgspec.Struct):
    waiting: _ContainerWait | None = None


class _Container(msgspec.Struct):
    state: _ContainerState = msgspec.field(default_factory=_ContainerState)


class _Status(msgspec.Struct):
    phase: str = ""
    conditions: list[_Condition] = []
    containers: list[_Container] = msgspec.field(name="containerStatuses", default_factory=list)


class _Spec(msgspec.Struct):
    suspend: bool = False
    node: str = msgspec.field(name="nodeName", default="")


class _Object(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _ListMeta(msgspec.Struct):
    next: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[_Object] | None = None


class Kubernetes:
    """The adapter for one namespace of one cluster."""

    def __init__(self, settings: KubernetesSettings, *, token: str) -> None:
        self._settings = settings
        self._client = ApiClient(url=settings.api_url, ca=settings.ca, token=token)

    def request(self, node: NodeRequest) -> str:
        name = job_name(node.name)
        has_job = False
        try:
            # Strict: a field that this release of Kubernetes lacks is refused, not dropped.
            answer = self._client.call(
                "POST", self._path("jobs"), query={"fieldValidation": "Strict"}, body=job_manifest(self._settings, node)
            )
            has_job = True
            secret = secret_manifest(node, decode(answer, _Object).metadata.uid)
            self._client.call("POST", self._path("secrets"), body=secret, may_quote=False)
        except CapacityError as error:
            # Without its token the Job would never start. After a refusal there is none, or an older one of this name.
            if has_job or not isinstance(error, EngineRefused):
                self.release(external_ids=[name])
            raise
        return name

    def list_nodes(self, *, prefix: str) -> dict[str, ListedNode]:
        label = f"{POOL_LABEL}={prefix.rstrip('-')}"
        jobs = self._list(self._path("jobs"), label)
        pods = {
            pod.metadata.labels.get("batch.kubernetes.io/job-name", ""): pod
            for pod in self._list(self._path("pods"), label)
        }
        listed = {}
        for job in jobs:
            name = job.metadata.annotations.get(NAME_ANNOTATION, "")
            is_ours = name.startswith(prefix) and job_name(name) == job.metadata.name
            pod = pods.get(job.metadata.name)
            if is_ours and not _has_ended(job, pod):
                listed[name] = _listed(job, pod)
        return listed

    def release(self, *, external_ids: Collection[str]) -> None:
        # Foreground: the Job is listed until its pod has saved and ended.
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        until, failed = time.monotonic() + _RELEASE_SECONDS, None
        for name in sorted(external_ids):
            if time.monotonic() > until:
                raise failed or CapacityError("The API server is too slow to delete all Jobs at once.")
            try:
                self._client.call("DELETE", f"{self._path('jobs')}/{name}", body=body, allowed=(404,))
            except CapacityError as error:
                failed = failed or error
        if failed:
            raise failed

    def _path(self, kind: str) -> str:
        group = "apis/batch/v1" if kind == "jobs" else "api/v1"
        return f"/{group}/namespaces/{self._settings.namespace}/{kind}"

    def _list(self, path: str, label: str) -> list[_Object]:
        found: list[_Object] = []
        query = {"labelSelector": label, "limit": str(_PAGE)}
        for _ in range(_MAX_PAGES):
            page = decode(self._client.call("GET", path, query=query), _List)
            found += page.items or []
            if not page.metadata.next:
                return found
            query["continue"] = page.metadata.next
        raise CapacityError("The API server lists too many objects of this pool.")


def _has_ended(job: _Object, pod: _Object | None) -> bool:
    """Return whether neither works any more. After its time limit a Job has failed while its pod still saves."""
    has_result = any(one.type in ("Complete", "Failed") and one.value == "True" for one in job.status.conditions)
    return has_result and (pod is None or pod.status.phase in ("Succeeded", "Failed"))


def _listed(job: _Object, pod: _Object | None) -> ListedNode:
    """Return the node's state. A pod with a machine does not wait, even if its image cannot be pulled."""
    if pod is None:
        reason = "Suspended" if job.spec.suspend else "Waits for a pod"
        return ListedNode(external_id=job.metadata.name, reason=reason, is_waiting=True)
    reasons = [one.state.waiting.reason for one in pod.status.containers if one.state.waiting]
    reasons += [one.message for one in pod.status.conditions if one.type == "PodScheduled" and one.value == "False"]
    reason = "; ".join(filter(None, reasons))
    shown = f"{pod.status.phase}: {reason}"[:200] if reason else ""
    return ListedNode(external_id=job.metadata.name, reason=shown, is_waiting=not pod.spec.node)
