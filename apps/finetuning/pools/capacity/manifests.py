"""What Kubernetes is asked to run: an Indexed Job for each node, and the Secret with its one-time token.

The pod fits the security standard "restricted": no root, no capabilities, no token of its service account.
"""

import ipaddress
import ssl
from contextlib import suppress
from typing import Annotated

import httpx2
import msgspec

from apps.contracts.addresses.networks import is_local
from apps.finetuning.pools.capacity.port import NodeRequest

MAX_CA_CHARACTERS = 20_000
GRACE_SECONDS = 120  # a worker saves and uploads within 110 seconds
_TTL_SECONDS = 300
POOL_LABEL, NAME_ANNOTATION = "anneal/pool", "anneal/node"
HOME, _TOKEN_DIR = "/var/lib/anneal", "/run/anneal"
REPLICA_PORT = 8003  # of a replica's pod, which has an address of its own; as in the chart
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_WORD = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_SELECTED = rf"([a-z0-9][a-z0-9.-]{{0,100}}/)?{_WORD}=({_WORD})?"
_Label = Annotated[str, msgspec.Meta(pattern=rf"^{_LABEL}\Z")]
ApiUrl = Annotated[
    str, msgspec.Meta(pattern=r"^https://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253})(:[0-9]{1,5})?\Z")
]
Image = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9][A-Za-z0-9._/:@-]{0,254}\Z")]
_Resource = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9.-]{1,100}/[A-Za-z0-9._-]{1,63}\Z")]
_Quantity = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,6}(\.[0-9]{1,3})?(m|Ki|Mi|Gi|Ti)?\Z")]
_Selector = Annotated[str, msgspec.Meta(pattern=rf"^{_SELECTED}(,{_SELECTED}){{0,9}}\Z", max_length=1000)]
ApiToken = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._~+/=-]{1,8192}\Z")]


class KubernetesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Where Jobs go and what they ask for.

    `ca` is the PEM of the API server's authority, `queue` a LocalQueue of Kueue, `node_selector` of the form
    `label=value,label=value`. `spot_node_selector` is that of spot nodes in a pool that has both kinds. Without a
    `gpu_resource` the nodes have no GPU.
    """

    api_url: ApiUrl
    namespace: _Label
    image: Image
    ca: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CA_CHARACTERS)]
    queue: _Label | None = None
    gpu_resource: _Resource | None = None
    node_selector: _Selector | None = None
    spot_node_selector: _Selector | None = None
    service_account: _Label | None = None
    cpu: _Quantity = "4"
    memory: _Quantity = "16Gi"
    user_id: Annotated[int, msgspec.Meta(ge=1, le=2_000_000_000)] = 10_001  # as in deploy/images/gpu.Dockerfile
    minutes: Annotated[int, msgspec.Meta(ge=5, le=43_200)] = 1440


def wrong_setting(*, api_url: str, ca: str | None) -> str:
    """Return the name of a setting that has the right form and cannot be used, or "".

    An address may be private or this machine, and no other that `is_local` refuses. Names are safe to call: nothing is
    sent before the other side has shown a certificate of the authority.
    """
    try:
        url = httpx2.URL(api_url)
    except httpx2.InvalidURL:
        return "api_url"
    if url.port is not None and not 1 <= url.port <= 65_535:
        return "api_url"
    with suppress(ValueError):
        address = ipaddress.ip_address(url.host)
        if is_local(address) and not address.is_loopback:
            return "api_url"
    if ca is None:
        return ""
    try:
        ssl.create_default_context(cadata=ca)
    except (ssl.SSLError, TypeError, ValueError):
        return "ca"
    return "ca" if "PRIVATE KEY" in ca else ""  # it would not be sealed


def job_name(node_name: str) -> str:
    """Return the Job's name: pods carry it as a label, so it has at most 63 characters."""
    return f"anneal-{'-'.join(node_name.split('-')[-2:])}"


def job_manifest(settings: KubernetesSettings, node: NodeRequest) -> dict[str, object]:
    """Return the Job of one node. It is not repeated: a second pod would have a token that was used."""
    labels = {POOL_LABEL: "-".join(node.name.split("-")[:-2])}
    queue = {"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(node.name), "labels": labels | queue, "annotations": {NAME_ANNOTATION: node.name},
        },
        "spec": {
            "completionMode": "Indexed", "completions": 1, "parallelism": 1, "backoffLimit": 0,
            "activeDeadlineSeconds": settings.minutes * 60, "ttlSecondsAfterFinished": _TTL_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": _pod(settings, node)},
        },
    }  # fmt: skip


def _pod(settings: KubernetesSettings, node: NodeRequest) -> dict[str, object]:
    user = settings.user_id
    pod: dict[str, object] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(settings, node)],
        "volumes": [
            {"name": "home", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "token", "secret": {"secretName": job_name(node.name), "defaultMode": 0o440}},
        ],
    }  # fmt: skip
    if settings.service_account:
        pod["serviceAccountName"] = settings.service_account
    selector = settings.spot_node_selector if node.is_spot else settings.node_selector
    labels = dict(each.split("=", 1) for each in selector.split(",")) if selector else {}
    if labels:
        pod["nodeSelector"] = labels
    tolerations = []
    if settings.gpu_resource:
        # Machines with GPUs are usually kept for pods that ask for them.
        tolerations.append({"key": settings.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    if node.is_spot:
        # GKE and AKS taint spot machines with the key and value of their label.
        tolerations += [
            {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in labels.items()
        ]
    if tolerations:
        pod["tolerations"] = tolerations
    return pod


def _container(settings: KubernetesSettings, node: NodeRequest) -> dict[str, object]:
    resources = {"cpu": settings.cpu, "memory": settings.memory}
    if settings.gpu_resource:
        resources[settings.gpu_resource] = str(node.gpus)
    variables = node.variables | {
        "ANNEAL_WORK_DIR": f"{HOME}/{node.kind}",
        "ANNEAL_ENROLL_TOKEN_FILE": f"{_TOKEN_DIR}/token",
    }
    if node.is_replica:
        variables["ANNEAL_REPLICA_PORT"] = str(REPLICA_PORT)
    environment: list[dict[str, object]] = [{"name": name, "value": value} for name, value in variables.items()]
    environment.append({"name": "ANNEAL_NODE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    return {
        "name": node.kind,
        "image": settings.image,
        "command": ["python", *node.arguments],
        "env": environment,
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "home", "mountPath": HOME},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
            {"name": "token", "mountPath": _TOKEN_DIR, "readOnly": True},
        ],
    }  # fmt: skip


def secret_manifest(node: NodeRequest, job_uid: str) -> dict[str, object]:
    """Return the Secret with the one-time token. It goes with the Job."""
    name = job_name(node.name)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}
    return {
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": True,
        "metadata": {"name": name, "ownerReferences": [owner]}, "stringData": {"token": node.token},
    }  # fmt: skip
