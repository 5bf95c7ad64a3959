"""Correction of one job's estimate by the calibration in use."""

import msgspec

from apps.estimates.calibration import Calibration, correct
from apps.estimates.requests import Correction
from apps.finetuning.models import GpuPool


def correction_of(*, pool: GpuPool, family: str, method: str) -> Correction | None:
    """Return the correction from the pool's version in use; None without one."""
    if pool.calibration is None:
        return None
    return correct(msgspec.convert(pool.calibration.calibration, Calibration), family=family, method=method)
