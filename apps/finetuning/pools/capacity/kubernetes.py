"""Kubernetes: one Indexed Job is one node. Kueue, if it is there, queues the Job by its label.

The one-time token is in a Secret that the Job owns. The Role in deploy/kubernetes/access.yaml allows what the adapter
does, and no more.
"""

import ssl
import time
from collections.abc import Collection, Mapping
from typing import NoReturn, TypeVar

import httpx2
import msgspec

from apps.finetuning.pools.capacity.manifests import (
    NAME_ANNOTATION,
    POOL_LABEL,
    KubernetesSettings,
    job_manifest,
    job_name,
    secret_manifest,
)
from apps.finetuning.pools.capacity.port import CapacityError, ListedNode, NodeRequest

_SECONDS = 8.0  # for one request
_RELEASE_SECONDS = 30.0  # for all that one call releases
_PAGE, _MAX_PAGES = 500, 4
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_TOO_SLOW = "The API server did not answer within {:g} seconds."
_Kind = TypeVar("_Kind")


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


class _Failure(msgspec.Struct):
    message: str = ""


class _Refused(CapacityError):
    """The API server did nothing, and says why with a status of 4xx."""


class Kubernetes:
    """The adapter for one namespace of one cluster."""

    def __init__(self, settings: KubernetesSettings, *, token: str) -> None:
        self._settings, self._token = settings, token

    def request(self, node: NodeRequest) -> str:
        name = job_name(node.name)
        has_job = False
        try:
            # Strict: a field that this release of Kubernetes lacks is refused, not dropped.
            answer = self._call(
                "POST", self._path("jobs"), query={"fieldValidation": "Strict"}, body=job_manifest(self._settings, node)
            )
            has_job = True
            secret = secret_manifest(node, _decode(answer, _Object).metadata.uid)
            self._call("POST", self._path("secrets"), body=secret, may_quote=False)
        except CapacityError as error:
            # Without its token the Job would never start. After a refusal there is none, or an older one of this name.
            if has_job or not isinstance(error, _Refused):
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
                self._call("DELETE", f"{self._path('jobs')}/{name}", body=body, allowed=(404,))
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
            page = _decode(self._call("GET", path, query=query), _List)
            found += page.items or []
            if not page.metadata.next:
                return found
            query["continue"] = page.metadata.next
        raise CapacityError("The API server lists too many objects of this pool.")

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        query: dict[str, str] | None = None,
        allowed: tuple[int, ...] = (),
        may_quote: bool = True,
    ) -> bytes:
        """Return the answer's body. Refusals are quoted unless the request holds a secret (`may_quote`)."""
        try:
            trust = ssl.create_default_context(cadata=self._settings.ca)
            with (
                httpx2.Client(verify=trust, timeout=_SECONDS, trust_env=False, follow_redirects=False) as client,
                client.stream(
                    method, self._settings.api_url + path, params=query, json=body,
                    headers={
                        "Authorization": f"Bearer {self._token}", "Accept": "application/json",
                        "Accept-Encoding": "identity",
                    },
                ) as answer,
            ):  # fmt: skip
                content = _read(answer)
        except httpx2.TimeoutException as error:
            raise CapacityError(_TOO_SLOW.format(_SECONDS)) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            raise CapacityError(f"The API server cannot be reached: {type(error).__name__}.") from error
        if not answer.is_success and answer.status_code not in allowed:
            self._refuse(answer.status_code, content if may_quote else b"")
        return content

    def _refuse(self, status: int, content: bytes) -> NoReturn:
        try:
            said = msgspec.json.decode(content, type=_Failure).message
        except msgspec.MsgspecError:
            said = ""
        said = " ".join(said.replace(self._token, "…").split())[:200]
        kind = _Refused if 400 <= status < 500 else CapacityError
        raise kind(f"The API server refused with {status}: {said or 'no reason'}")


def _read(answer: httpx2.Response) -> bytes:
    """Return the body as sent. Raises CapacityError if it is too large or takes too long as a whole."""
    until, content = time.monotonic() + _SECONDS, bytearray()
    for part in answer.iter_raw():
        content += part
        if len(content) > _MAX_ANSWER_BYTES:
            raise CapacityError("The API server's answer is too large.")
        if time.monotonic() > until:
            raise CapacityError(_TOO_SLOW.format(_SECONDS))
    return bytes(content)


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


def _decode(content: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise CapacityError("The API server's answer is not what its API describes.") from error
