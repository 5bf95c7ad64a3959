"""The end of a retraining: its decision is stored, and the people concerned are notified."""

import datetime

from django.utils.translation import gettext

from apps.accounts.models import Membership
from apps.accounts.notices.events import announce
from apps.accounts.roles import Admin, Owner
from apps.billing.budgets import attribution_of_actor
from apps.core.database.transitions import advance
from apps.finetuning.lifecycle import RETRAINING_TRANSITIONS, RetrainingStatus
from apps.finetuning.models import Retraining

_CODE_LENGTH, _REASON_LENGTH = 48, 500


def finish(retraining: Retraining, *, to: RetrainingStatus, code: str, reason: str, now: datetime.datetime) -> None:
    """End a retraining with its reason, and announce the end unless it was skipped."""
    advance(
        retraining,
        to=to,
        transitions=RETRAINING_TRANSITIONS,
        code=code[:_CODE_LENGTH],
        reason=reason[:_REASON_LENGTH],
        finished_at=now,
    )
    if to == RetrainingStatus.SKIPPED:
        return
    # The member in whose name it acts; none for a service account, or if they left.
    by = attribution_of_actor(organization=retraining.organization_id, by=retraining.created_by, labels={}).member_id
    people = Membership.objects.for_organization(retraining.organization_id).people()
    person = by if people.filter(user_id=by).exists() else ""
    announce(
        organization=retraining.organization_id,
        type=f"retraining.{to}",
        subject=retraining.pk,
        title=lambda: _title(retraining),
        path=f"/jobs/{retraining.job_id or retraining.plan.source_job_id}",
        key=f"retraining:{retraining.pk}",
        users=[person] if person else [],
        roles=[] if person else [Owner.name, Admin.name],
        data={"plan_id": retraining.plan_id, "code": retraining.code},
    )


def _title(retraining: Retraining) -> str:
    match retraining.status:
        case RetrainingStatus.PROMOTED:
            title = gettext("%(name)s was retrained, and the new model is in production")
        case RetrainingStatus.KEPT:
            title = gettext("%(name)s was retrained, and production stays as it is")
        case RetrainingStatus.REFUSED:
            title = gettext("%(name)s was not retrained: %(reason)s")
        case _:
            title = gettext("The retraining of %(name)s failed: %(reason)s")
    return title % {"name": retraining.plan.name, "reason": retraining.reason}
