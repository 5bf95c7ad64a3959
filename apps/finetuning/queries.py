"""Queries of jobs and their events, checkpoints, runs and pools."""

from collections.abc import Iterable, Sequence

import msgspec
from django.db.models import Q, QuerySet
from django.utils.translation import gettext

from apps.accounts.members.visibility import visible
from apps.accounts.models import ApiKey, Organization, is_allowed
from apps.accounts.queries import regions_of
from apps.adapters.models import AdapterVersion
from apps.contracts.evaluation import EvaluationReport
from apps.core.errors import NotFound
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import list_versions
from apps.finetuning.models import Checkpoint, FineTuningJob, GpuPool, JobEvent, Run, Worker

_WITH = (
    "base_model",
    "training_file__dataset",
    "validation_file__dataset",
    "pool__gpu_type",
    "price_rule",
    "adapter_version",
)


def get_job(*, organization: Organization | str, id: str, related: Sequence[str] = _WITH) -> FineTuningJob:
    """Return the organization's job with `related` rows.

    Raises NotFound, the same for unknown and foreign ids and for private projects that the request does not see.
    """
    job = visible(FineTuningJob.objects.for_organization(organization)).select_related(*related).filter(pk=id).first()
    if job is None:
        raise NotFound(
            gettext("No fine-tuning job has the id %(id)s.") % {"id": repr(id[:64])},
            param="fine_tuning_job_id",
            code="fine_tuning_job_not_found",
        )
    return job


def list_jobs(*, organization: Organization | str) -> QuerySet[FineTuningJob]:
    """Return the organization's jobs, newest first, without those of private projects that the request does not see."""
    jobs = visible(FineTuningJob.objects.for_organization(organization))
    return jobs.select_related(*_WITH).order_by("-created_at", "-id")


def find_jobs_of_adapters(
    *, organization: Organization | str, versions: Iterable[AdapterVersion]
) -> dict[str, FineTuningJob]:
    """Return the job that made each version, by the version's id; a version that no job made has no entry."""
    jobs = list_jobs(organization=organization).filter(adapter_version__in=[version.pk for version in versions])
    return {str(job.adapter_version_id): job for job in jobs}


def find_training_file(*, version: AdapterVersion) -> DatasetVersion | None:
    """Return the file that the version, or the checkpoint it was, learned from; None if that is deleted."""
    files = list_versions(organization=version.organization_id)
    return files.filter(jobs__in=_jobs_of(version), status=DatasetVersionStatus.READY).first()


def maker_of(version: AdapterVersion) -> str:
    """Return the user of the member whose job made the version, or who uploaded it."""
    maker = _jobs_of(version).values_list("member_id", flat=True).first() or version.source
    return ApiKey.objects.filter(pk=maker).values_list("created_by_id", flat=True).first() or maker


def report_of(version: AdapterVersion) -> EvaluationReport | None:
    """Return the version's report on base and tuned model; None if it was not evaluated.

    The rows that got worse are left out if the request does not see the files that they are from.
    """
    report = msgspec.convert(version.report, EvaluationReport) if version.report else None
    if report is None or not report.worse or all(_sees_files(job) for job in _jobs_of(version)):
        return report
    return msgspec.structs.replace(report, worse=())


def _jobs_of(version: AdapterVersion) -> QuerySet[FineTuningJob]:
    run, checkpoint = (model.objects.filter(pk=version.source).values("job") for model in (Run, Checkpoint))
    jobs = FineTuningJob.objects.for_organization(version.organization_id)
    return jobs.filter(Q(pk__in=run) | Q(pk__in=checkpoint))


def find_region_obstacle(*, organization: Organization | str) -> str:
    """Return why no pool may do the organization's work, "" if one may."""
    regions = regions_of(organization=organization)
    if regions is None or GpuPool.objects.filter(region__in=regions).exists():
        return ""
    text = gettext("No pool is in a region that your organization may use: %(regions)s.")
    return text % {"regions": ", ".join(regions)}


def list_events(*, job: FineTuningJob) -> QuerySet[JobEvent]:
    """Return the job's events, newest first, without samples if the request does not see the job's files."""
    events = job.events.order_by("-sequence")
    return events if _sees_files(job) else events.exclude(type="samples")


def list_news(*, job: FineTuningJob) -> QuerySet[JobEvent]:
    """Return the changes of state and the messages: all events but metrics and log lines."""
    return job.events.exclude(type__in=("metrics", "log")).defer("data")


def list_log_lines(*, job: FineTuningJob) -> QuerySet[JobEvent]:
    """Return the lines that the job's trainers wrote."""
    return job.events.filter(type="log")


def list_samples(*, job: FineTuningJob) -> QuerySet[JobEvent]:
    """Return the model's answers to the sample prompts, by step; a later attempt repeats some steps.

    Prompts are rows of the job's files, so a request that does not see the files gets none.
    """
    return job.events.filter(type="samples") if _sees_files(job) else job.events.none()


def _sees_files(job: FineTuningJob) -> bool:
    named = {job.training_file_id, job.validation_file_id} - {None}
    files = DatasetVersion.objects.for_organization(job.organization_id).filter(pk__in=named)
    return visible(files, project="dataset__project").count() == len(named)


def list_events_after(*, job: FineTuningJob, sequence: int) -> list[JobEvent]:
    """Return the events after `sequence`, at most 500, oldest first."""
    return list(job.events.filter(sequence__gt=sequence).order_by("sequence")[:500])


def list_checkpoints(*, job: FineTuningJob) -> QuerySet[Checkpoint]:
    """Return the checkpoints that still exist, newest first."""
    rows = job.checkpoints.filter(deleted_at=None, quarantined_at=None)
    return rows.select_related("job__base_model", "job__organization").order_by("-step")


def latest_checkpoint(*, job: FineTuningJob) -> Checkpoint | None:
    """Return the job's newest checkpoint that is neither quarantined nor deleted."""
    usable = job.checkpoints.filter(quarantined_at=None, deleted_at=None).select_related("upload")
    return usable.order_by("-step", "-created_at").first()


def best_of(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint with the lowest evaluation loss; None if none was evaluated."""
    evaluated = [each for each in checkpoints if each.metrics.get("valid_loss") is not None]
    return min(evaluated, key=lambda each: each.metrics["valid_loss"], default=None)


def list_pools() -> QuerySet[GpuPool]:
    return GpuPool.objects.select_related("gpu_type", "capacity", "borrows_from").order_by("name")


def names_of_pools(*, organization: Organization | str) -> list[str]:
    """Return the names of the open pools in the organization's regions."""
    regions = regions_of(organization=organization)
    return [pool.name for pool in list_pools().filter(is_open=True) if is_allowed(regions, pool.region_id)]


def list_workers(*, pool: GpuPool) -> QuerySet[Worker]:
    return pool.workers.filter(revoked_at=None).order_by("created_at")
