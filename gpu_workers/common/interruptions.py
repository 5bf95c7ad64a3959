"""Notices of a cloud that it will take this machine away. Each leads to the same end as SIGTERM.

The machine's firmware names the cloud, so nothing has to be configured, and a machine elsewhere asks nothing. The
addresses and answers are those of the clouds' documentation:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
https://cloud.google.com/compute/docs/instances/spot#preemption-process
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

log = logging.getLogger(__name__)

METADATA_URL = "http://169.254.169.254"  # of all three clouds; it is reached from the machine alone
_FIRMWARE = Path("/sys/class/dmi/id")
_AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"  # of its virtual machines; other machines of the vendor have none
_SECONDS_BETWEEN_LOOKS = 5.0  # as AWS recommends; Google and Azure take the machine after 30 seconds
_TIMEOUT_SECONDS = 2.0
_ENDINGS = frozenset({"Preempt", "Terminate"})

Look = Callable[[httpx.Client], str]


class _ScheduledEvent(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str] = []


class _ScheduledEvents(msgspec.Struct, rename="pascal"):
    events: list[_ScheduledEvent]


def _look_at_aws(client: httpx.Client) -> str:
    token = _text(client.put("/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}))
    answer = client.get("/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token})
    return "" if answer.status_code == httpx.codes.NOT_FOUND else _text(answer)


def _look_at_google(client: httpx.Client) -> str:
    headers = {"Metadata-Flavor": "Google"}
    is_preempted = _text(client.get("/computeMetadata/v1/instance/preempted", headers=headers)).strip() == "TRUE"
    return "preempted" if is_preempted else ""


def _look_at_azure(client: httpx.Client) -> str:
    """Return the first event that ends this machine. Those of the other machines of a scale set are listed too."""
    headers = {"Metadata": "true"}
    place = {"api-version": "2021-02-01", "format": "text"}
    name = _text(client.get("/metadata/instance/compute/name", headers=headers, params=place))
    answer = _text(client.get("/metadata/scheduledevents", headers=headers, params={"api-version": "2020-07-01"}))
    events = msgspec.json.decode(answer, type=_ScheduledEvents).events
    ending = (event.event_type for event in events if event.event_type in _ENDINGS and name in event.resources)
    return next(ending, "")


def _text(answer: httpx.Response) -> str:
    return answer.raise_for_status().text


def find_cloud(firmware: Path = _FIRMWARE) -> Look | None:
    """Return the function that looks for a notice of this machine's cloud, or None outside these clouds."""
    vendor = _read(firmware / "sys_vendor")
    if vendor == "Amazon EC2":
        return _look_at_aws
    if vendor == "Google":
        return _look_at_google
    if vendor == "Microsoft Corporation" and _read(firmware / "chassis_asset_tag") == _AZURE_ASSET_TAG:
        return _look_at_azure
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class Watch:
    """Looks for the notice of a machine's cloud. Outside the known clouds it looks at nothing."""

    def __init__(self, look: Look | None = None, *, url: str = METADATA_URL) -> None:
        self._look = look or find_cloud()
        self._url = url
        self._has_warned = False

    def has_notice(self) -> bool:
        """Look once. Metadata that fail are no notice, and are reported once."""
        if self._look is None:
            return False
        try:
            with httpx.Client(base_url=self._url, timeout=_TIMEOUT_SECONDS, trust_env=False) as client:  # no proxy
                notice = self._look(client)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            if not self._has_warned:
                log.warning("No notice of an interruption can be seen, the cloud's metadata fails: %s", error)
            self._has_warned = True
            return False
        if notice:
            log.warning("The cloud takes this machine away: %s", notice)
        return bool(notice)

    def start(
        self,
        *,
        stopped: threading.Event,
        on_notice: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        """Look in a thread until there is a notice or `stopped` is set; call `on_notice` once."""
        if self._look is not None:
            threading.Thread(target=self._run, args=(stopped, on_notice), name="interruptions", daemon=True).start()

    def _run(self, stopped: threading.Event, on_notice: Callable[[], None]) -> None:
        while not stopped.is_set():
            if self.has_notice():
                on_notice()
                return
            stopped.wait(_SECONDS_BETWEEN_LOOKS)
