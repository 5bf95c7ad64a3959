"""Names of the models that checkpoints become, whether or not such a model exists yet."""

from apps.accounts.members.visibility import visible
from apps.accounts.models import Organization
from apps.adapters.models import AdapterVersion
from apps.adapters.operations import CHECKPOINT_MARK, model_name_of
from apps.contracts.hyperparameters import Method
from apps.core.ids import ulid_of
from apps.finetuning.models import Checkpoint, FineTuningJob

_MAX_STEP = 9  # digits
_ULID_SHOWN = 10  # characters of a job's id in its model's name


def name_of(checkpoint: Checkpoint) -> str:
    """Return the public name of the checkpoint's model, whether or not the model exists yet."""
    job = checkpoint.job
    model_name = model_name_of(
        base_model=job.base_model, organization=job.organization, suffix=job.suffix, ulid=ulid_of(job.pk)
    )
    return f"{model_name}{CHECKPOINT_MARK}{checkpoint.step}"


def may_answer(job: FineTuningJob) -> bool:
    """Return whether the engine can load the job's result as an adapter."""
    return job.method != Method.FULL and not job.hyperparameters.get("use_dora")


def find_named(organization: Organization | str, model_name: str) -> Checkpoint | None:
    """Return the checkpoint that a name stands for, if the request sees it.

    Return None if it cannot be served, or if its model already exists or was deleted.
    """
    of_job, mark, step = model_name.partition(CHECKPOINT_MARK)
    if not (mark and step.isascii() and step.isdigit() and len(step) <= _MAX_STEP):
        return None
    rows = visible(Checkpoint.objects.for_organization(organization), project="job__project")
    rows = rows.filter(deleted_at=None, quarantined_at=None)
    rows = rows.filter(job__pk__endswith=of_job.rpartition(":")[2][-_ULID_SHOWN:], step=int(step))
    for checkpoint in rows.select_related("job__base_model", "job__organization"):
        if name_of(checkpoint) == model_name and may_answer(checkpoint.job):
            is_known = AdapterVersion.objects.filter(model_name=model_name).exists()
            return None if is_known else checkpoint
    return None
