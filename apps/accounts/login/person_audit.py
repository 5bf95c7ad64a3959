"""What people do with their own account, in the audit log: sign-in, password, second factor.

Each such entry is written to the platform's log and to that of every organization the person is then a member of, so
that an organization reads of its members alone.
"""

from typing import Any

from apps.accounts.models import Membership, User
from apps.core import audit
from apps.core.database.tenancy import system

ANONYMOUS = "anonymous"


def record_for_person(*, user: User | None, action: str, by: str = "", **details: Any) -> None:
    """Append an entry about a person's account, for None about an address without one. Runs in any context."""
    with system():
        memberships = Membership.objects.filter(user=user).order_by("organization_id") if user else []
        audit.record_in_each(
            organizations=[None, *(membership.organization_id for membership in memberships)],
            by=by or (user.pk if user else ANONYMOUS),
            action=action,
            target=user.pk if user else ANONYMOUS,
            **details,
        )
