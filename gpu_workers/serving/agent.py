"""The serving agent, which keeps the desired adapters on one engine: `python -m gpu_workers.serving.agent`.

The agent is the engine's only client (reconciler.py) and its network door (front_door.py). It observes the engine every
second. It reports changes at once, and its state at least every five seconds.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
from aiohttp import web

from apps.contracts.struct import prepare_types
from apps.contracts.worker_api import EnrollResponse
from gpu_workers.common.api_client import ApiClient, ApiError, Unavailable
from gpu_workers.common.config import CANARY_FOLDER, ConfigError, ServingConfig, read_serving_config
from gpu_workers.common.downloads import OpenObject
from gpu_workers.common.enrolment import NotEnrolled, ensure_enrolled
from gpu_workers.common.files import PRIVATE, replace_file
from gpu_workers.engine.state import EnginePaths, ReplicaBase
from gpu_workers.serving.adapters.store import AdapterStore
from gpu_workers.serving.reconciler import Reconciler
from gpu_workers.serving.trials.canary_engine import CanaryEngine
from gpu_workers.serving.whole_model import wait_for_model

log = logging.getLogger("anneal.serving")

TICK_SECONDS = 1.0
REPORT_SECONDS = 5.0
NUMBERS_SECONDS = 2.0
LOAD_SECONDS = 5.0
UNROUTED_SECONDS = 2.5  # a gateway reads its routes every second


def main() -> int:
    """Run as a process below the supervisor."""
    try:
        config = read_serving_config()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    level = config.worker.log_level
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr, level=level)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        enrollment = enroll(config)
    except NotEnrolled as error:
        log.error("%s", error)
        return 1
    prepare_types()
    asyncio.run(serve(config, enrollment))
    return 0


async def serve(config: ServingConfig, enrollment: EnrollResponse) -> None:
    """Run the agent until SIGTERM or SIGINT."""
    worker = config.worker
    api = ApiClient(worker.internal_url, credential=enrollment.credential)
    store = AdapterStore(
        worker.work_dir.resolve() / "adapters", make_opener(worker.internal_url), limit_bytes=config.cache_bytes
    )
    has_canary = config.has_canary_engine and not enrollment.is_whole_model
    canary = CanaryEngine(worker.work_dir.resolve() / CANARY_FOLDER) if has_canary else None
    reconciler = Reconciler(config=config, enrollment=enrollment, api=api, store=store, canary=canary)
    task = asyncio.create_task(_run(reconciler, canary, api, config.listen))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    draining = asyncio.create_task(_drain(stopping, reconciler, config.drain_seconds))
    await asyncio.wait({task, draining}, return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    if not task.done():
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        log.info("stopped")


async def _drain(stopping: asyncio.Event, reconciler: Reconciler, seconds: float) -> None:
    """Wait for the stop request; then leave the routes, finish the running answers, and return."""
    await stopping.wait()
    log.info("draining")
    reconciler.begin_draining()
    try:
        async with asyncio.timeout(seconds / 3):
            await reconciler.not_ready_reported.wait()
    except TimeoutError:
        log.warning("the control plane did not acknowledge the shutdown")
    await asyncio.sleep(UNROUTED_SECONDS)  # every gateway reads this first; requests are still answered
    reconciler.door.close("draining")
    try:
        async with asyncio.timeout(seconds):
            while reconciler.door.is_busy():
                await asyncio.sleep(0.1)
    except TimeoutError:
        log.warning("answers under way were not waited for any longer")


async def _run(reconciler: Reconciler, canary: CanaryEngine | None, api: ApiClient, listen: str) -> None:
    runner = web.AppRunner(reconciler.door.build_app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await _listen(runner, listen)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_repeat(reconciler.step, TICK_SECONDS))
            tasks.create_task(_repeat(reconciler.check_numbers, NUMBERS_SECONDS))
            tasks.create_task(_repeat(reconciler.measure_load, LOAD_SECONDS))
            tasks.create_task(_report_forever(reconciler, api))
            if canary is not None:
                tasks.create_task(_repeat(canary.step, TICK_SECONDS))
    finally:
        await runner.cleanup()
        if canary is not None:
            await canary.close()
        await reconciler.engine.close()


async def _repeat(action: Callable[[], Awaitable[None]], seconds: float) -> None:
    while True:
        await action()
        await asyncio.sleep(seconds)


async def _report_forever(reconciler: Reconciler, api: ApiClient) -> None:
    while True:
        reconciler.changed.clear()
        seen = reconciler.observe()
        try:
            await asyncio.to_thread(api.report_observed_state, seen)
            reconciler.record_reported(seen)
        except (Unavailable, ApiError) as error:
            log.warning("observed state not reported: %s", error)
            await asyncio.sleep(1.0)
        try:
            await asyncio.wait_for(reconciler.changed.wait(), REPORT_SECONDS)
        except TimeoutError:
            continue


def enroll(config: ServingConfig) -> EnrollResponse:
    """Return this replica's credential; wait for the file with the one-time token if neither exists yet.

    Writes the file that the engine's launcher waits for. Raises NotEnrolled.
    """
    worker = config.worker
    worker.work_dir.mkdir(parents=True, exist_ok=True)
    while not worker.credential_file.exists() and worker.enroll_token_file and not worker.enroll_token_file.exists():
        time.sleep(0.5)
    enrollment = ensure_enrolled(worker, kind="replica", listen_url=config.reached_at)
    base = _find_base(config, enrollment)
    replace_file(EnginePaths(worker.work_dir).replica, msgspec.json.encode(base), mode=PRIVATE)
    return enrollment


def _find_base(config: ServingConfig, enrollment: EnrollResponse) -> ReplicaBase:
    """Return the base that the engine must serve; wait for the files of a whole model."""
    if not enrollment.is_whole_model:
        base = msgspec.convert(enrollment.base_model or {}, ReplicaBase)
        return msgspec.structs.replace(base, files_sha256=enrollment.files_sha256, hub_token=enrollment.hub_token)
    return wait_for_model(
        enrollment,
        config.models_dir,
        api=ApiClient(config.worker.internal_url, credential=enrollment.credential),
        open_object=make_opener(config.worker.internal_url),
        url=config.reached_at,
    )


def make_opener(internal_url: str) -> OpenObject:
    """Return a function that opens a signed URL of any object store; the URL is the only key."""
    uds = httpx.HTTPTransport(uds="/" + internal_url.removeprefix("unix:").lstrip("/"))
    transport = uds if internal_url.startswith("unix:") else None
    internal = httpx.Client(base_url="http://internal", transport=transport, timeout=30, trust_env=False)
    anywhere = httpx.Client(timeout=30, trust_env=False)

    @contextmanager
    def open_object(url: str) -> Iterator[Iterator[bytes]]:
        is_internal = transport is not None and url.startswith(internal_url)
        client, target = (internal, url.removeprefix(internal_url)) if is_internal else (anywhere, url)
        with client.stream("GET", target) as response:
            response.raise_for_status()
            yield response.iter_bytes(1 << 20)

    return open_object


async def _listen(runner: web.AppRunner, listen: str) -> None:
    if listen.startswith(("/", "unix:")):
        path = Path("/" + listen.removeprefix("unix:").lstrip("/"))
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        await web.UnixSite(runner, str(path)).start()
        path.chmod(0o660)
        return
    host, _, port = listen.rpartition(":")
    await web.TCPSite(runner, host, int(port)).start()


if __name__ == "__main__":
    sys.exit(main())
