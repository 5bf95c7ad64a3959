"""Audit entries about people's own accounts: sign-in, password, second factor.

Each entry is written to the platform's log and to the log of every organization the person is then a member of, so an
organization reads only about its members.
"""

from apps.accounts.models import Membership, User
from apps.core import audit
from apps.core.database.tenancy import system

ANONYMOUS = "anonymous"


def record_for_person(*, user: User | None, action: str, by: str = "", **details: object) -> None:
    """Append an entry about a person's account; None means an address without an account. Runs in any context."""
    with system():
        rows = Membership.objects.filter(user=user).order_by("organization_id")
        of_person: list[str] = list(rows.values_list("organization_id", flat=True)) if user else []
        audit.record_in_each(
            organizations=[None, *of_person],
            by=by or (user.pk if user else ANONYMOUS),
            action=action,
            target=user.pk if user else ANONYMOUS,
            **details,
        )
