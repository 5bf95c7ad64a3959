"""Whom queues and limits count: an organization that paid by itself, the others together with all of their founder.

Anybody makes several organizations. One that never paid, and whose limits no operator has set, has no share of its own:
it has one with the others that its founder made.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from apps.accounts.models import Organization
from apps.core.database.tenancy import all_tenants


def list_sharing(*, organizations: Collection[str]) -> dict[str, str]:
    """Return the ids of these organizations and of all that share with them, each with its share holder.

    Run it where all tenants are visible.
    """
    holders = Organization.objects.filter(pk__in=organizations).values(holder=Organization.share_holder_by())
    found = Organization.objects.annotate(holder=Organization.share_holder_by()).filter(holder__in=holders)
    return dict(found.values_list("pk", "holder"))


def get_share_holder(*, organization: Any) -> str:
    """Return whom fair shares and limits count for an organization; its own id where it is not visible."""
    organization_id = getattr(organization, "pk", organization)
    found = Organization.objects.filter(pk=organization_id).annotate(holder=Organization.share_holder_by())
    return found.values_list("holder", flat=True).first() or organization_id


@contextmanager
def share_of(organization: Any) -> Iterator[list[str]]:
    """Run with a view of all organizations that share with this one; yields their ids, its own among them.

    What is read there of others is added up and never shown.
    """
    organization_id = getattr(organization, "pk", organization)
    if get_share_holder(organization=organization_id) == organization_id:
        yield [organization_id]
        return
    with all_tenants():
        yield sorted(list_sharing(organizations=[organization_id]))


def give_own_share(*, organization: Any) -> None:
    """Count the organization by itself from now on."""
    organization_id = getattr(organization, "pk", organization)
    sharing = Organization.objects.filter(pk=organization_id, has_own_share=False)
    if sharing.exists():  # not each role that comes here may write it, and none has to
        sharing.update(has_own_share=True)
