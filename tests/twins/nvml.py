"""NVML of a machine with some GPUs, or with a broken driver."""

from types import SimpleNamespace


def make_nvml(
    *names: str, driver: str = "580.65", free_share: float = 1.0, error: str | None = None
) -> SimpleNamespace:
    """The part of pynvml that workers call: GPU i has the UUID "GPU-i" and i bytes more than 80 GiB."""

    class NVMLError(Exception):
        pass

    class NotThere(NVMLError):
        pass

    def init() -> None:
        if error is not None:
            raise NVMLError(error)

    def memory(handle: int) -> SimpleNamespace:
        total = 80 * 2**30 + handle
        return SimpleNamespace(total=total, free=int(total * free_share))

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVMLError_LibraryNotFound=NotThere,
        NVMLError_DriverNotLoaded=NotThere,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-")),
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetName=lambda handle: names[handle],
        nvmlDeviceGetMemoryInfo=memory,
        nvmlSystemGetDriverVersion=lambda: driver,
    )
