"""A job as one run of an MLflow tracking server, over MLflow's REST API 2.0.

mlflow-skinny would add fastapi, databricks-sdk and an older cachetools for the five calls made here.
"""

import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from apps.contracts.addresses.customer_servers import PORT, check_server
from apps.contracts.addresses.networks import is_public
from apps.contracts.runs import Tracker
from gpu_workers.trainer.tracking.points import FinalStatus, MetricPoint

_TIMEOUT_SECONDS, _ANSWER_SECONDS = 15.0, 60.0
_MAX_ANSWER_BYTES = 1024 * 1024
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM = 1000, 100, 500  # limits of log-batch
_STATUS = {
    FinalStatus.SUCCEEDED: "FINISHED",
    FinalStatus.CANCELLED: "KILLED",
    FinalStatus.PAUSED: "SCHEDULED",
}
_JOB_TAG = "anneal.job"


class MlflowRefused(OSError):
    """The server answered with an error."""


class MlflowRun:
    """The MLflow run with this job's tag. A resumed job continues it."""

    def __init__(self, tracker: Tracker, *, job_id: str, parameters: Mapping[str, str]) -> None:
        parts = urlsplit(tracker.url)
        self._extensions: dict[str, Any] = {}
        proxy = getproxies().get("https")
        if proxy:  # the proxy looks the name up and refuses private addresses (deploy/egress); here the lookup may fail
            origin = f"{parts.scheme}://{parts.netloc}"
        else:
            # Connect to the checked address, even if the name resolves differently later; TLS uses the name.
            origin, self._extensions = public_origin(tracker.url), {"sni_hostname": parts.hostname}
        self._http = httpx.Client(
            base_url=f"{origin}{parts.path.rstrip('/')}/api/2.0/mlflow/",
            proxy=proxy,
            headers={"Host": parts.netloc, "Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {tracker.secret}"} if tracker.secret else {}),
            timeout=_TIMEOUT_SECONDS,
            follow_redirects=False,
            trust_env=False,
        )
        experiment = self._experiment(tracker.project)
        self._run_id = self._found(experiment, job_id) or self._create(experiment, tracker, job_id)
        self._batch(params=[{"key": k, "value": v[:_MAX_PARAM]} for k, v in parameters.items()][:_MAX_PARAMS])

    def log(self, points: Sequence[MetricPoint]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            {"key": name, "value": value, "timestamp": now_ms, "step": point.step}
            for point in points
            for name, value in point.values.items()
        ]
        for at in range(0, len(metrics), _MAX_METRICS):
            self._batch(metrics=metrics[at : at + _MAX_METRICS])

    def finish(self, status: FinalStatus) -> None:
        self._update(_STATUS.get(status, "FAILED"), end_time=int(time.time() * 1000))
        self._http.close()

    def _experiment(self, name: str) -> str:
        try:
            found = self._call("GET", "experiments/get-by-name", {"experiment_name": name})
            return str(found["experiment"]["experiment_id"])
        except MlflowRefused as error:
            if "RESOURCE_DOES_NOT_EXIST" not in str(error):
                raise
        return str(self._call("POST", "experiments/create", {"name": name})["experiment_id"])

    def _found(self, experiment: str, job_id: str) -> str | None:
        asked = {"experiment_ids": [experiment], "filter": f"tags.`{_JOB_TAG}` = '{job_id}'", "max_results": 1}
        runs = self._call("POST", "runs/search", asked).get("runs") or []
        if not runs:
            return None
        self._run_id = str(runs[0]["info"]["run_id"])
        self._update("RUNNING")
        return self._run_id

    def _create(self, experiment: str, tracker: Tracker, job_id: str) -> str:
        tags = [{"key": _JOB_TAG, "value": job_id}, *({"key": tag, "value": "true"} for tag in tracker.tags)]
        asked = {
            "experiment_id": experiment,
            "run_name": tracker.name or job_id,
            "start_time": int(time.time() * 1000),
            "tags": tags,
        }
        return str(self._call("POST", "runs/create", asked)["run"]["info"]["run_id"])

    def _batch(self, **what: object) -> None:
        self._call("POST", "runs/log-batch", {"run_id": self._run_id} | what)

    def _update(self, status: str, **more: object) -> None:
        self._call("POST", "runs/update", {"run_id": self._run_id, "status": status} | more)

    def _call(self, method: str, path: str, asked: Mapping[str, object]) -> Any:
        sent = {"params": asked} if method == "GET" else {"json": asked}
        with self._http.stream(method, path, extensions=self._extensions, **sent) as answer:  # type: ignore[arg-type]
            content = _content_of(answer)
        if answer.status_code != httpx.codes.OK:
            text = content[:200].decode("utf-8", "replace")
            raise MlflowRefused(f"{path} was answered with {answer.status_code}: {text}")
        return json.loads(content)


def _content_of(answer: httpx.Response) -> bytes:
    """Return the body. Raises MlflowRefused if it is compressed, long or slow: the server is untrusted."""
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise MlflowRefused("the answer is compressed, which was not asked for")
    content, until = bytearray(), time.monotonic() + _ANSWER_SECONDS
    for part in answer.iter_raw():
        content += part
        if len(content) > _MAX_ANSWER_BYTES:
            raise MlflowRefused(f"the answer is longer than {_MAX_ANSWER_BYTES:,} bytes")
        if time.monotonic() > until:
            raise MlflowRefused(f"the answer took longer than {_ANSWER_SECONDS:.0f} s")
    return bytes(content)


def public_origin(url: str) -> str:
    """Return the server's origin with its address. Raises ValueError for a private network, which only we may reach."""
    host = check_server(url).hostname
    found = [str(address[4][0]) for address in socket.getaddrinfo(host, PORT, type=socket.SOCK_STREAM)]
    if not found or not all(map(is_public, found)):
        raise ValueError("the tracking server's address is not a public one")
    return f"https://[{found[0]}]:{PORT}" if ":" in found[0] else f"https://{found[0]}:{PORT}"
