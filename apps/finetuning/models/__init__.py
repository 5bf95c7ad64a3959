"""Models of jobs, of the runs that carry them out, and of the machines that do the work."""

from apps.finetuning.models.calibrations import CalibrationPoint, CalibrationVersion, PoolAccuracy
from apps.finetuning.models.capacity import CapacityKind, CapacityNode, CapacityToken, PoolCapacity
from apps.finetuning.models.conversions import Conversion
from apps.finetuning.models.examinations import Examination
from apps.finetuning.models.hub_pushes import HubPush, HubPushToken
from apps.finetuning.models.jobs import Allowance, AllowanceScope, FineTuningJob, JobEvent, Quota, TrackerKey
from apps.finetuning.models.pools import (
    GpuPool,
    MemoryRehearsal,
    PricePolicy,
    ThroughputProbe,
    Worker,
    WorkerKind,
    WorkerToken,
)
from apps.finetuning.models.retraining import Retraining, RetrainingPlan
from apps.finetuning.models.runs import Checkpoint, GpuDay, QueueRanking, QueueShare, Run, RunMember, RunUpload

__all__ = [
    "Allowance",
    "AllowanceScope",
    "CalibrationPoint",
    "CalibrationVersion",
    "CapacityKind",
    "CapacityNode",
    "CapacityToken",
    "Checkpoint",
    "Conversion",
    "Examination",
    "FineTuningJob",
    "GpuDay",
    "GpuPool",
    "HubPush",
    "HubPushToken",
    "JobEvent",
    "MemoryRehearsal",
    "PoolAccuracy",
    "PoolCapacity",
    "PricePolicy",
    "QueueRanking",
    "QueueShare",
    "Quota",
    "Retraining",
    "RetrainingPlan",
    "Run",
    "RunMember",
    "RunUpload",
    "ThroughputProbe",
    "TrackerKey",
    "Worker",
    "WorkerKind",
    "WorkerToken",
]
