"""The event of a run's end, for webhooks."""

from apps.accounts.notices.events import announce
from apps.serving.evals.lifecycle import EvalRunStatus
from apps.serving.evals.models import EvalRun

# OpenAI names the event of a completed run differently from its status.
_NAMES = {EvalRunStatus.COMPLETED: "succeeded", EvalRunStatus.FAILED: "failed", EvalRunStatus.CANCELED: "canceled"}


def announce_end(run: EvalRun) -> None:
    """Record the event of this end. Run it in the transaction of the change."""
    name = _NAMES[EvalRunStatus(run.status)]
    announce(
        organization=run.organization_id,
        type=f"eval.run.{name}",
        subject=run.pk,
        title=lambda: f"Eval run {run.pk}: {name}",
        path=f"/evals/{run.evaluated_id}/runs/{run.pk}",
        key=f"eval:{run.pk}:{name}",
    )
