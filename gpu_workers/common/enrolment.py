"""Redeem a one-time token for this machine's credential.

python -m gpu_workers.common.enrolment --kind trainer --token …
"""

import argparse
import logging
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from apps.contracts.worker_api import EnrollRequest, EnrollResponse
from gpu_workers.common.api_client import ApiClient, ApiError, Unavailable, load_credential
from gpu_workers.common.config import ConfigError, WorkerConfig, read_config, read_serving_config
from gpu_workers.common.files import PRIVATE, replace_file
from gpu_workers.common.preflight import GpuUnreachable, inspect_machine

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 120.0
_NOT_CONNECTED = (
    httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError, httpx.UnsupportedProtocol,
)  # fmt: skip
_START = {
    "trainer": "python -m celery -A gpu_workers.trainer.celery_app worker --queues train.{pool} --pool solo"
    " --prefetch-multiplier 1 --without-gossip --without-mingle",
    "replica": "python -m gpu_workers.engine.launcher & python -m gpu_workers.serving.agent",
}


class NotEnrolled(Exception):
    """The credential is missing and cannot be obtained; the message names the next step."""


def ensure_enrolled(
    config: WorkerConfig,
    *,
    kind: str,
    listen_url: str = "",
    api: ApiClient | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> EnrollResponse:
    """Return the stored credential. Redeems the token file first if no credential is stored; raises NotEnrolled."""
    if config.credential_file.exists():
        return load_credential(config.credential_file)
    token_file = config.enroll_token_file
    if token_file is None or not token_file.exists():
        raise NotEnrolled(
            "This machine has no credential: run `python -m gpu_workers.common.enrolment --kind … --token …`."
        )
    token = token_file.read_text().strip()
    return enroll(config, kind=kind, token=token, listen_url=listen_url, api=api, sleep=sleep)


def enroll(
    config: WorkerConfig,
    *,
    kind: str,
    token: str,
    listen_url: str = "",
    api: ApiClient | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> EnrollResponse:
    """Redeem the token and store the credential, readable by this user only; raises NotEnrolled."""
    config.work_dir.mkdir(parents=True, exist_ok=True)
    config.credential_file.parent.mkdir(parents=True, exist_ok=True)
    machine = inspect_machine(config.work_dir, gpu_key=config.self_check_gpu_key)
    request = EnrollRequest(
        token=token,
        kind=kind,
        hostname=socket.gethostname(),
        gpus=machine.gpus,
        software=machine.software,
        memory_bytes=machine.memory_bytes,
        listen_url=listen_url,
    )
    answer = _redeem(api or ApiClient(config.internal_url), request, sleep)
    replace_file(config.credential_file, msgspec.json.encode(answer), mode=PRIVATE)
    log.info("Enrolled as %s in pool %s", answer.worker_id, answer.pool)
    return answer


def _redeem(api: ApiClient, request: EnrollRequest, sleep: Callable[[float], None]) -> EnrollResponse:
    """Redeem the token, which works once.

    It is sent again only if no connection was made, or if the control plane answered with a temporary error. Raises
    NotEnrolled.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return api.enroll(request)
        except ApiError as error:
            raise NotEnrolled(f"The token was not accepted: {error}") from error
        except Unavailable as error:
            cause = error.__cause__
            if isinstance(cause, httpx.TransportError) and not isinstance(cause, _NOT_CONNECTED):
                raise NotEnrolled(
                    "The answer of the control plane was lost, so the token may be used. Generate a new join command. "
                    "If this machine is listed in its pool, revoke that worker."
                ) from error
            if time.monotonic() > deadline:
                raise NotEnrolled(f"The control plane does not answer: {error}") from error
        sleep(1.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_workers.common.enrolment", description=__doc__)
    parser.add_argument("--kind", choices=("trainer", "replica"), required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--token", help="the one-time token of the operator's page")
    source.add_argument("--token-file", type=Path)
    arguments = parser.parse_args()
    token = arguments.token or arguments.token_file.read_text().strip()
    try:
        config = read_config()
        answer = enroll(
            config,
            kind=arguments.kind,
            token=token,
            listen_url=read_serving_config().reached_at if arguments.kind == "replica" else "",
        )
    except (ConfigError, NotEnrolled, GpuUnreachable) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    also = ""
    if arguments.kind == "trainer" and not config.broker_url:
        also = " and CELERY_BROKER_URL, the broker as this pool's user anneal_trainer or anneal_trainer_<pool>"
    sys.stdout.write(
        f"Enrolled as {answer.worker_id} in pool {answer.pool}; the credential is {config.credential_file}.\n"
        f"Start it with the same variables{also}:\n"
        f"    {_START[arguments.kind].format(pool=answer.pool)}\n"
    )
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
