"""The adapter of Kubernetes against a stateful twin of its API, over TLS on loopback."""

import datetime
import ipaddress
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from apps.finetuning.pools.capacity import kubernetes
from apps.finetuning.pools.capacity.kubernetes import Kubernetes, KubernetesSettings, job_manifest
from apps.finetuning.pools.capacity.port import CapacityError, NodeRequest

TOKEN, ONCE = "operator-token", "one-time-token"
PREFIX = "anneal-pool-" + "1" * 26 + "-"
NODE = NodeRequest(
    name=f"{PREFIX}node-" + "2" * 26, pool="pool_x", token=ONCE, internal_url="https://internal", idle_seconds=60
)
JOB = "anneal-node-" + "2" * 26


class Twin(BaseHTTPRequestHandler):
    """Jobs, pods and secrets of one namespace. `faults` maps a method and a kind to what it answers."""

    def _answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _handle(self):
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        path = urlsplit(self.path)
        kind, _, name = path.path.partition("/namespaces/ml/")[2].partition("/")
        server = self.server
        fault = server.faults.get((self.command, kind))
        if fault == "slow":
            server.stop.wait(5)
            return None
        if fault and fault != "lost":
            return self._answer(fault, {"kind": "Status", "message": f"fault {self.headers['Authorization']}"})
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._answer(401, {"kind": "Status", "message": "Unauthorized"})
        rows = server.rows[kind]
        if self.command == "POST":
            name = body["metadata"]["name"]
            if name in rows:
                return self._answer(409, {"kind": "Status", "message": f'{kind} "{name}" already exists'})
            body["metadata"]["uid"] = f"uid-{name}"
            rows[name] = body
            if fault == "lost":  # stored, but the answer does not say so
                return self._answer(504, {"message": "lost"})
            return self._answer(201, body)
        if self.command == "DELETE":
            if rows.pop(name, None) is None:
                return self._answer(404, {"kind": "Status", "message": "not found"})
            server.deletions.append(body)
            owned = [key for key, row in server.rows["secrets"].items()
                     if row["metadata"]["ownerReferences"][0]["uid"] == f"uid-{name}"]  # fmt: skip
            for key in owned:
                del server.rows["secrets"][key]
            return self._answer(200, {"kind": "Status", "status": "Success"})
        query = parse_qs(path.query)
        key, _, value = query["labelSelector"][0].partition("=")
        found = [row for row in rows.values() if row["metadata"]["labels"].get(key) == value]
        start = int(query.get("continue", ["0"])[0])
        more = {"continue": str(start + 1)} if start + 1 < len(found) else {}
        return self._answer(200, {"metadata": more, "items": found[start : start + 1]})

    do_GET = do_POST = do_DELETE = _handle  # noqa: N815 - names of the base class

    def log_message(self, *_):
        pass


def certificate(folder):
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
    (folder / "twin.pem").write_bytes(private + pem)
    return pem.decode()


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Twin)
    server.ca = certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "twin.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.stop = threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.stop.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def settings(twin):
    twin.rows, twin.faults, twin.deletions = {"jobs": {}, "pods": {}, "secrets": {}}, {}, []
    url = f"https://127.0.0.1:{twin.server_address[1]}"
    return KubernetesSettings(api_url=url, namespace="ml", image="anneal/trainer:1", ca=twin.ca, queue="gpu")


def test_a_node_is_requested_listed_and_released(twin, settings):
    engine = Kubernetes(settings, token=TOKEN)
    assert engine.request(NODE) == JOB
    twin.rows["jobs"]["other"] = twin.rows["jobs"][JOB] | {"metadata": {"name": "other", "labels": {}}}
    [secret] = twin.rows["secrets"].values()
    assert secret["metadata"]["ownerReferences"][0]["uid"] == f"uid-{JOB}"
    assert secret["stringData"] == {"token": ONCE}
    assert ONCE not in json.dumps(twin.rows["jobs"])

    job = twin.rows["jobs"][JOB]
    job["spec"]["suspend"] = True
    [(name, listed)] = engine.list_nodes(prefix=PREFIX).items()
    assert (name, listed.external_id, listed.is_waiting, listed.reason) == (NODE.name, JOB, True, "Suspended")
    labels = {"batch.kubernetes.io/job-name": JOB} | job["spec"]["template"]["metadata"]["labels"]
    pod = {"metadata": {"name": "p", "labels": labels}, "spec": {}, "status": {"phase": "Pending", "conditions": [
        {"type": "PodScheduled", "status": "False", "message": "no GPU"}]}}  # fmt: skip
    twin.rows["pods"]["p"] = pod
    assert engine.list_nodes(prefix=PREFIX)[NODE.name].reason == "Pending: no GPU"
    pod["spec"]["nodeName"], pod["status"]["conditions"] = "n1", []
    pod["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]
    listed = engine.list_nodes(prefix=PREFIX)[NODE.name]
    assert (listed.is_waiting, listed.reason) == (False, "Pending: ImagePullBackOff")

    with pytest.raises(CapacityError, match="409"):
        engine.request(NODE)
    assert JOB in twin.rows["jobs"]  # the first one stays

    # A page holds one job.
    second = NodeRequest(**vars(NODE) | {"name": PREFIX + "node-" + "3" * 26})
    engine.request(second)
    assert engine.list_nodes(prefix=PREFIX).keys() == {NODE.name, second.name}
    job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    assert engine.list_nodes(prefix=PREFIX).keys() == {second.name}

    engine.release(external_ids=[JOB, "anneal-node-gone"])
    assert JOB not in twin.rows["jobs"]
    assert JOB not in twin.rows["secrets"]
    assert [body["propagationPolicy"] for body in twin.deletions] == ["Foreground"]


def test_faults_are_capacity_errors_without_the_token_and_leave_nothing(twin, settings, monkeypatch, tmp_path):
    monkeypatch.setattr(kubernetes, "_SECONDS", 0.3)
    engine = Kubernetes(settings, token=TOKEN)
    for fault in (401, 403, 404, 409, 422, 429, 500, 503, "slow"):
        for method, kind in (("POST", "jobs"), ("POST", "secrets"), ("GET", "jobs"), ("GET", "pods")):
            twin.faults = {(method, kind): fault}
            with pytest.raises(CapacityError) as failed:
                engine.request(NODE) if method == "POST" else engine.list_nodes(prefix=PREFIX)
            assert ("0.3 seconds" if fault == "slow" else str(fault)) in str(failed.value)
            assert TOKEN not in str(failed.value)
            assert not twin.rows["jobs"]
            assert not twin.rows["secrets"]
    for kind in ("jobs", "secrets"):
        twin.faults = {("POST", kind): "lost"}
        with pytest.raises(CapacityError, match="504"):
            engine.request(NODE)
        assert not twin.rows["jobs"]
        assert not twin.rows["secrets"]
    twin.faults = {}
    with pytest.raises(CapacityError, match="401"):
        Kubernetes(settings, token="other").list_nodes(prefix=PREFIX)
    foreign = msgspec.structs.replace(settings, ca=certificate(tmp_path))
    with pytest.raises(CapacityError, match="cannot be reached"):
        Kubernetes(foreign, token=TOKEN).list_nodes(prefix=PREFIX)


def test_the_job_runs_once_without_rights(settings):
    job = job_manifest(settings, NODE)
    spec, labels = job["spec"], job["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "gpu"
    assert (spec["completionMode"], spec["backoffLimit"], spec["activeDeadlineSeconds"]) == ("Indexed", 0, 86_400)
    assert spec["ttlSecondsAfterFinished"] == 300
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    [container] = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize(
    ("name", "value"),
    [("api_url", "http://a"), ("api_url", "https://a/x"), ("api_url", "https://u@a"), ("namespace", "a/../b"),
     ("namespace", "a\n"), ("image", "a b"), ("queue", "A"), ("gpu_resource", "gpu"), ("user_id", 0)],
)  # fmt: skip
def test_settings_are_checked(name, value, settings):
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert(msgspec.to_builtins(settings) | {name: value}, KubernetesSettings)
