"""Certification results of a job's adapter, recorded among the job's events."""

from django.db import transaction

from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.models import AdapterVersion
from apps.finetuning import events
from apps.finetuning.models import FineTuningJob


@transaction.atomic
def record_certification_event(*, version_id: str) -> None:
    """Append the result to the events of the job that made the version; do nothing if no job made it."""
    version = AdapterVersion.objects.get(pk=version_id)
    job = FineTuningJob.objects.select_for_update(of=("self",)).filter(adapter_version=version).first()
    if job is not None:
        is_refused = version.status == AdapterVersionStatus.REFUSED
        events.append(
            job,
            type="state",
            level="error" if is_refused else "info",
            message=_words(version),
            adapter_status=version.status,
            parity=version.parity or None,
        )


def _words(version: AdapterVersion) -> str:
    if version.status == AdapterVersionStatus.REFUSED:
        return f"The serving engine refused the adapter: {version.status_reason}"
    if not version.parity:
        return "The serving engine loaded the adapter. It has no parity certificate."
    parity = version.parity
    return (
        f"Certified by {parity['engine']}: on {parity['tokens']} tokens its log-probabilities are within "
        f"{parity['tuned_difference']:.4f} of the trainer's ({parity['tolerance']:g} is allowed) and "
        f"{parity['effect']:.3f} away from the base model's"
    )
