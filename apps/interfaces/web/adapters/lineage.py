"""The origin of an adapter version and the jobs that continued it, for its page."""

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlencode

from django.urls import reverse
from django.utils.translation import gettext

from apps.accounts.members.visibility import visible
from apps.adapters.models import AdapterVersion
from apps.adapters.operations import CHECKPOINT_MARK
from apps.adapters.queries import list_siblings
from apps.core.messages.translation import translated
from apps.finetuning.models import Checkpoint, FineTuningJob
from apps.finetuning.queries import list_jobs
from apps.finetuning.recipes.stored_requests import stored_request
from apps.serving.aliases import list_aliases
from apps.serving.queries import ServingState, serving_states

_MAX_DESCENDANTS = 5
_MAX_COMPARED = 4  # columns of the playground


@dataclass(frozen=True)
class Ancestor:
    """The model that training began with, unless it was a base model.

    It has no address if it is deleted or hidden from the reader.
    """

    label: str
    url: str


@dataclass(frozen=True)
class Sibling:
    version: AdapterVersion
    serving: ServingState
    step: str  # of a checkpoint, else ""
    aliases: str


def ancestor_of(job: FineTuningJob | None) -> Ancestor | None:
    if job is None:
        return None
    start = stored_request(job).start_from
    if start.version:
        versions = AdapterVersion.objects.for_organization(job.organization_id).filter(pk=start.version)
        version = visible(versions, project="adapter__project").select_related("adapter").first()
        if version is None and versions.exists():
            return Ancestor(start.model or start.version, "")
        if version is None or version.deleted_at is not None:
            return Ancestor(gettext("{name} (deleted)").format(name=start.model or start.version), "")
        url = reverse("web:adapter_detail", args=[version.pk])
        return Ancestor(f"{version.adapter.name}, {translated(version.label)}", url)
    if not start.checkpoint:
        return None
    checkpoints = Checkpoint.objects.for_organization(job.organization_id).filter(pk=start.checkpoint)
    checkpoint = visible(checkpoints, project="job__project").select_related("job").first()
    if checkpoint is None:
        return Ancestor(
            start.checkpoint if checkpoints.exists() else gettext("{name} (deleted)").format(name=start.checkpoint), ""
        )
    url = reverse("web:job_detail", args=[checkpoint.job_id])
    return Ancestor(
        gettext("{name}, step {step}").format(name=checkpoint.job.suffix or checkpoint.job_id, step=checkpoint.step),
        url,
    )


def list_descendants(version: AdapterVersion) -> list[FineTuningJob]:
    """Return the newest jobs that continued the version."""
    jobs = list_jobs(organization=version.organization_id).filter(requested__start_from__version=version.pk)
    return list(jobs[:_MAX_DESCENDANTS])


def siblings_of(version: AdapterVersion) -> list[Sibling]:
    """Return every usable version of the adapter, newest first, with its serving state and its aliases."""
    versions = list(list_siblings(version=version))
    states = serving_states(versions=versions)
    names: dict[str, list[str]] = {}
    for alias in list_aliases(organization=version.organization_id).filter(adapter_id=version.adapter_id):
        names.setdefault(alias.version_id, []).append(alias.name)
    return [
        Sibling(one, states[one.pk], one.model_name.partition(CHECKPOINT_MARK)[2], ", ".join(names.get(one.pk, ())))
        for one in versions
    ]


def comparison_url(version: AdapterVersion, siblings: Iterable[Sibling]) -> str:
    """Return the address that compares the version with the newest other deployed ones; "" if fewer than two exist."""
    served = [one.version.model_name for one in siblings if one.serving.is_deployed]
    if len(served) < 2 or version.model_name not in served:
        return ""
    others = [name for name in served if name != version.model_name]
    asked = [("model", name) for name in [version.model_name, *others][:_MAX_COMPARED]]
    return f"{reverse('web:playground')}?{urlencode(asked)}"
