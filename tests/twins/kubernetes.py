"""A stand-in of the API server of Kubernetes: jobs, pods and secrets of the namespace `ml`, over TLS.

It is strict where a real one is: unknown fields, names, missing owners and the token. `faults` maps a method and a kind
to the answer instead: a status, "slow", "large", or "lost" (done, but the answer says it was not).
"""

import datetime
import ipaddress
import json
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.twins.http_server import Answer, Request, serve_http

TOKEN = "operator-token"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_VERBS = {"POST": "create", "GET": "list", "DELETE": "delete"}
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti)?")


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """Base of the parts of manifests, with the fields of Kubernetes 1.30 that nodes use."""


class _JobMeta(_Strict):
    name: str
    labels: dict[str, str]
    annotations: dict[str, str]


class _PodMeta(_Strict):
    labels: dict[str, str]


class _Field(_Strict):
    field_path: str


class _Source(_Strict):
    field_ref: _Field


class _Variable(_Strict):
    name: str
    value: str | None = None
    value_from: _Source | None = None


class _Resources(_Strict):
    requests: dict[str, str]
    limits: dict[str, str]


class _Capabilities(_Strict):
    drop: list[str]


class _ContainerContext(_Strict):
    allow_privilege_escalation: bool
    capabilities: _Capabilities


class _Mount(_Strict):
    name: str
    mount_path: str
    read_only: bool = False


class _Container(_Strict):
    name: str
    image: str
    command: list[str]
    env: list[_Variable]
    resources: _Resources
    security_context: _ContainerContext
    volume_mounts: list[_Mount]


class _Profile(_Strict):
    type: str


class _PodContext(_Strict):
    run_as_non_root: bool
    run_as_user: int
    run_as_group: int
    fs_group: int
    seccomp_profile: _Profile


class _EmptyDir(_Strict):
    medium: str = ""


class _SecretVolume(_Strict):
    secret_name: str
    default_mode: int


class _Volume(_Strict):
    name: str
    empty_dir: _EmptyDir | None = None
    secret: _SecretVolume | None = None


class _Toleration(_Strict):
    key: str
    operator: str
    effect: str


class _Pod(_Strict):
    restart_policy: str
    termination_grace_period_seconds: int
    automount_service_account_token: bool
    enable_service_links: bool
    security_context: _PodContext
    containers: list[_Container]
    volumes: list[_Volume]
    service_account_name: str = ""
    node_selector: dict[str, str] = {}
    tolerations: list[_Toleration] = []


class _Template(_Strict):
    metadata: _PodMeta
    spec: _Pod


class _JobSpec(_Strict):
    completion_mode: str
    completions: int
    parallelism: int
    backoff_limit: int
    active_deadline_seconds: int
    ttl_seconds_after_finished: int
    template: _Template


class Job(_Strict):
    api_version: str
    kind: str
    metadata: _JobMeta
    spec: _JobSpec


class _Owner(_Strict):
    api_version: str
    kind: str
    name: str
    uid: str


class _SecretMeta(_Strict):
    name: str
    owner_references: list[_Owner]


class Secret(_Strict):
    api_version: str
    kind: str
    type: str
    immutable: bool
    metadata: _SecretMeta
    string_data: dict[str, str]


class KubernetesTwin:
    """The namespace's objects by kind and name, and what was called: verb and kind."""

    def __init__(self, folder: Path) -> None:
        self.ca = make_certificate(folder / "twin.pem")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(folder / "twin.pem")
        self.url = ""
        self.reset()

    def reset(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {"jobs": {}, "pods": {}, "secrets": {}}
        self.faults: dict[tuple[str, str], int | str] = {}
        self.called: set[tuple[str, str]] = set()
        self.faulted: list[str] = []  # paths of the calls that a fault answered
        self.deletions: list[dict[str, Any]] = []

    def start_pod(self, job: str, **status: Any) -> dict[str, Any]:
        """Give the job a pod that no machine has yet."""
        labels = {"batch.kubernetes.io/job-name": job} | self.rows["jobs"][job]["spec"]["template"]["metadata"][
            "labels"
        ]
        pod = {"metadata": {"name": job, "labels": labels}, "spec": {}, "status": {"phase": "Pending"} | status}
        self.rows["pods"][job] = pod
        return pod

    def answer(self, request: Request) -> Answer:
        url = urlsplit(request.path)
        group, _, path = url.path.partition("/namespaces/ml/")
        kind, _, name = path.partition("/")
        body = json.loads(request.body) if request.body else {}
        fault = self.faults.get((request.method, kind))
        if fault:
            self.faulted.append(request.path)
        if fault == "slow":
            return Answer(content=b" " * 5, seconds_a_byte=0.2)
        if fault == "large":
            return Answer(content=b" " * 1_000_000)
        if fault and fault != "lost":
            return _status(int(fault), f"fault {request.headers['Authorization']} {request.body.decode()}")
        if request.bearer != TOKEN:
            return _status(401, "Unauthorized")
        if group != ("/apis/batch/v1" if kind == "jobs" else "/api/v1") or kind not in self.rows:
            return _status(404, "the server could not find the requested resource")
        self.called.add((_VERBS[request.method], kind))
        if request.method == "POST":
            return self._create(kind, body, is_lost=fault == "lost")
        if request.method == "DELETE":
            return self._delete(name, body)
        return self._list(kind, parse_qs(url.query))

    def _create(self, kind: str, body: dict[str, Any], *, is_lost: bool) -> Answer:
        if problem := _problem(kind, body) or self._orphan(body):
            return _status(422, problem)
        name = body["metadata"]["name"]
        if name in self.rows[kind]:
            return _status(409, f'{kind} "{name}" already exists')
        body["metadata"]["uid"] = f"uid-{name}"
        self.rows[kind][name] = body
        return _status(504, "lost") if is_lost else Answer(201, json.dumps(body).encode())

    def _orphan(self, body: dict[str, Any]) -> str:
        """Return a problem if an owner is no job: the garbage collector would delete the object at once."""
        uids = {row["metadata"].get("uid") for row in self.rows["jobs"].values()}
        owners = body["metadata"].get("ownerReferences", [])
        return "no such owner" if any(owner["uid"] not in uids for owner in owners) else ""

    def _delete(self, name: str, body: dict[str, Any]) -> Answer:
        if self.rows["jobs"].pop(name, None) is None:
            return _status(404, "not found")
        self.deletions.append(body)
        self.rows["pods"].pop(name, None)
        for key, row in list(self.rows["secrets"].items()):
            if row["metadata"]["ownerReferences"][0]["uid"] == f"uid-{name}":
                del self.rows["secrets"][key]
        return _status(200, "")

    def _list(self, kind: str, query: dict[str, list[str]]) -> Answer:
        """Answer with one object a page."""
        key, _, value = query["labelSelector"][0].partition("=")
        found = [row for row in self.rows[kind].values() if row["metadata"]["labels"].get(key) == value]
        start = int(query.get("continue", ["0"])[0])
        more = {"continue": str(start + 1)} if start + 1 < len(found) else {}
        return Answer(content=json.dumps({"metadata": more, "items": found[start : start + 1] or None}).encode())


def _status(code: int, message: str) -> Answer:
    return Answer(
        code, json.dumps({"kind": "Status", "message": message}).encode(), {"Location": "https://127.0.0.1:9/"}
    )


def _problem(kind: str, body: dict[str, Any]) -> str:
    try:
        if kind == "secrets":
            secret = msgspec.convert(body, Secret)
            names, labels, amounts = [secret.metadata.name], {}, []
        else:
            job = msgspec.convert(body, Job)
            pod = job.spec.template.spec
            labels = job.metadata.labels | job.spec.template.metadata.labels | pod.node_selector
            amounts = [value for each in pod.containers for value in each.resources.limits.values()]
            names = [job.metadata.name, *(each.name for each in pod.volumes), *filter(None, [pod.service_account_name])]
            mounted = {mount.name for each in pod.containers for mount in each.volume_mounts}
            if mounted != {volume.name for volume in pod.volumes}:
                return "a mount has no volume"
    except msgspec.ValidationError as error:
        return str(error)
    is_named = all(_NAME.fullmatch(name) for name in names)
    is_labelled = all(_VALUE.fullmatch(value) for value in labels.values())
    return "" if is_named and is_labelled and all(map(_QUANTITY.fullmatch, amounts)) else "a name or amount is wrong"


def make_certificate(path: Path) -> str:
    """Write a key and its certificate for 127.0.0.1, and return the certificate."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "twin")])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = made.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + pem)
    return pem.decode()


@contextmanager
def serve_kubernetes(folder: Path) -> Iterator[KubernetesTwin]:
    """Serve a twin whose key lies in `folder`."""
    twin = KubernetesTwin(folder)
    with serve_http(twin.answer, tls=twin.context) as url:
        twin.url = url
        yield twin
