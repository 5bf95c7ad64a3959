"""Kubernetes: one Indexed Job is one node. Kueue, if it is there, queues the Job by its label.

The one-time token is in a Secret that the Job owns. The adapter needs these verbs in its namespace: jobs create, list
and delete; pods list; secrets create.
"""

import ssl
from collections.abc import Collection, Mapping
from typing import Annotated, NoReturn, TypeVar

import httpx2
import msgspec

from apps.finetuning.pools.capacity.port import CapacityError, ListedNode, NodeRequest

_SECONDS = 8.0  # for one request
_PAGE, _MAX_PAGES = 500, 10
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_GRACE_SECONDS = 120  # a worker saves and uploads within 110 seconds
_TTL_SECONDS = 300
_POOL_LABEL, _NAME_ANNOTATION = "anneal/pool", "anneal/node"
_WORK_DIR, _TOKEN_DIR = "/var/lib/anneal", "/run/anneal"
_Kind = TypeVar("_Kind")
_Label = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")]
_Url = Annotated[str, msgspec.Meta(pattern=r"^https://[A-Za-z0-9.\[\]:-]{1,200}\Z")]
_Image = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9][A-Za-z0-9._/:@-]{0,254}\Z")]
_Resource = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9.-]{1,100}/[A-Za-z0-9._-]{1,63}\Z")]
_Quantity = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,6}(\.[0-9]{1,3})?(m|Ki|Mi|Gi|Ti)?\Z")]


class KubernetesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Where Jobs go and what they ask for. `ca` is the PEM of the API server's authority."""

    api_url: _Url
    namespace: _Label
    image: _Image
    ca: Annotated[str, msgspec.Meta(min_length=1, max_length=65_536)]
    queue: _Label | None = None  # a LocalQueue of Kueue
    gpu_resource: _Resource = "nvidia.com/gpu"
    gpus: Annotated[int, msgspec.Meta(ge=0, le=64)] = 1
    cpu: _Quantity = "4"
    memory: _Quantity = "16Gi"
    user_id: Annotated[int, msgspec.Meta(ge=1, le=2_000_000_000)] = 10_001
    minutes: Annotated[int, msgspec.Meta(ge=5, le=43_200)] = 1440


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
    items: list[_Object] = []


class _Failure(msgspec.Struct):
    message: str = ""


class _Conflict(CapacityError):
    """An object of this name exists."""


class Kubernetes:
    """The adapter for one namespace of one cluster."""

    def __init__(self, settings: KubernetesSettings, *, token: str) -> None:
        self._settings, self._token = settings, token

    def request(self, node: NodeRequest) -> str:
        space, name = self._settings.namespace, job_name(node.name)
        has_job = False
        try:
            answer = self._call(
                "POST", f"/apis/batch/v1/namespaces/{space}/jobs", body=job_manifest(self._settings, node)
            )
            has_job = True
            secret = secret_manifest(node, _decode(answer, _Object).metadata.uid)
            self._call("POST", f"/api/v1/namespaces/{space}/secrets", body=secret)
        except CapacityError as error:
            # Without its token the Job would never start. An older Job of this name is left alone.
            if has_job or not isinstance(error, _Conflict):
                self.release(external_ids=[name])
            raise
        return name

    def list_nodes(self, *, prefix: str) -> dict[str, ListedNode]:
        space, label = self._settings.namespace, f"{_POOL_LABEL}={prefix.rstrip('-')}"
        jobs = self._list(f"/apis/batch/v1/namespaces/{space}/jobs", label)
        pods = {
            pod.metadata.labels.get("batch.kubernetes.io/job-name", ""): pod
            for pod in self._list(f"/api/v1/namespaces/{space}/pods", label)
        }
        return {
            job.metadata.annotations[_NAME_ANNOTATION]: _listed(job, pods.get(job.metadata.name))
            for job in jobs
            if not _has_ended(job) and job.metadata.annotations.get(_NAME_ANNOTATION, "").startswith(prefix)
        }

    def release(self, *, external_ids: Collection[str]) -> None:
        # Foreground: the Job is listed until its pod has saved and ended.
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        for name in sorted(external_ids):
            path = f"/apis/batch/v1/namespaces/{self._settings.namespace}/jobs/{name}"
            self._call("DELETE", path, body=body, allowed=(404,))

    def _list(self, path: str, label: str) -> list[_Object]:
        found: list[_Object] = []
        query = {"labelSelector": label, "limit": str(_PAGE)}
        for _ in range(_MAX_PAGES):
            page = _decode(self._call("GET", path, query=query), _List)
            found += page.items
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
    ) -> bytes:
        try:
            trust = ssl.create_default_context(cadata=self._settings.ca)
            with (
                httpx2.Client(verify=trust, timeout=_SECONDS, trust_env=False, follow_redirects=False) as client,
                client.stream(
                    method, self._settings.api_url + path, params=query, json=body,
                    headers={"Authorization": f"Bearer {self._token}", "Accept": "application/json"},
                ) as answer,
            ):  # fmt: skip
                content = b""
                for part in answer.iter_bytes():
                    content += part
                    if len(content) > _MAX_ANSWER_BYTES:
                        raise CapacityError("The API server's answer is too large.")
        except httpx2.TimeoutException as error:
            raise CapacityError(f"The API server did not answer within {_SECONDS:g} seconds.") from error
        except (httpx2.HTTPError, ssl.SSLError, OSError, ValueError) as error:
            raise CapacityError(f"The API server cannot be reached: {type(error).__name__}.") from error
        if not answer.is_success and answer.status_code not in allowed:
            self._refuse(answer.status_code, content)
        return content

    def _refuse(self, status: int, content: bytes) -> NoReturn:
        try:
            said = msgspec.json.decode(content, type=_Failure).message
        except msgspec.MsgspecError:
            said = ""
        said = " ".join(said.replace(self._token, "…").split())[:200]
        kind = _Conflict if status == 409 else CapacityError
        raise kind(f"The API server refused with {status}: {said or 'no reason'}")


def job_name(node_name: str) -> str:
    """Return the Job's name: pods carry it as a label, so it has at most 63 characters."""
    return f"anneal-{'-'.join(node_name.split('-')[-2:])}"


def job_manifest(settings: KubernetesSettings, node: NodeRequest) -> dict[str, object]:
    """Return the Job of one node. It is not repeated: a second pod would have a token that was used."""
    labels = {_POOL_LABEL: "-".join(node.name.split("-")[:-2])}
    queue = {"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {}
    resources: dict[str, str] = {"cpu": settings.cpu, "memory": settings.memory}
    if settings.gpus:
        resources[settings.gpu_resource] = str(settings.gpus)
    environment: list[dict[str, object]] = [
        {"name": name, "value": value}
        for name, value in (
            ("ANNEAL_INTERNAL_URL", node.internal_url),
            ("ANNEAL_POOL", node.pool),
            ("ANNEAL_WORK_DIR", _WORK_DIR),
            ("ANNEAL_ENROLL_TOKEN_FILE", f"{_TOKEN_DIR}/token"),
        )
    ]
    environment.append({"name": "ANNEAL_NODE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    container = {
        "name": "trainer",
        "image": settings.image,
        "command": [
            "python", "-m", "gpu_workers.trainer.polling", "--exit-when-idle", str(node.idle_seconds),
        ],
        "env": environment,
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "work", "mountPath": _WORK_DIR},
            {"name": "token", "mountPath": _TOKEN_DIR, "readOnly": True},
        ],
    }  # fmt: skip
    user = settings.user_id
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "work", "emptyDir": {}},
            {"name": "token", "secret": {"secretName": job_name(node.name), "defaultMode": 0o440}},
        ],
    }  # fmt: skip
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(node.name), "labels": labels | queue, "annotations": {_NAME_ANNOTATION: node.name},
        },
        "spec": {
            "completionMode": "Indexed", "completions": 1, "parallelism": 1, "backoffLimit": 0,
            "activeDeadlineSeconds": settings.minutes * 60, "ttlSecondsAfterFinished": _TTL_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }  # fmt: skip


def secret_manifest(node: NodeRequest, job_uid: str) -> dict[str, object]:
    """Return the Secret with the one-time token. It goes with the Job."""
    name = job_name(node.name)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}
    return {
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": True,
        "metadata": {"name": name, "ownerReferences": [owner]}, "stringData": {"token": node.token},
    }  # fmt: skip


def _has_ended(job: _Object) -> bool:
    return any(one.type in ("Complete", "Failed") and one.value == "True" for one in job.status.conditions)


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
