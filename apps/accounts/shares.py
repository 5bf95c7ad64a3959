"""The share holders that queues and limits count by.

Anyone can create several organizations. An organization that never paid, and whose limits no operator has set,
therefore has no share of its own: it shares one with its founder's other such organizations.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from apps.accounts.models import Organization
from apps.core.database.tenancy import all_tenants, id_of


def list_sharing(*, organizations: Collection[str]) -> dict[str, str]:
    """Return the ids of these organizations and of those that share with them, each with its share holder.

    Run it where all tenants are visible.
    """
    holders = Organization.objects.filter(pk__in=organizations).values(holder=Organization.share_holder_by())
    found = Organization.objects.annotate(holder=Organization.share_holder_by()).filter(holder__in=holders)
    return dict(found.values_list("pk", "holder"))


def get_share_holder(*, organization: Organization | str) -> str:
    """Return the share holder of an organization; return its own id if it is not visible."""
    organization_id = id_of(organization)
    found = Organization.objects.filter(pk=organization_id).annotate(holder=Organization.share_holder_by())
    return found.values_list("holder", flat=True).first() or organization_id


@contextmanager
def share_of(organization: Organization | str) -> Iterator[list[str]]:
    """Make all organizations that share with this one visible; yield their ids, including its own.

    Data read from the others may only be summed, never shown.
    """
    organization_id = id_of(organization)
    if get_share_holder(organization=organization_id) == organization_id:
        yield [organization_id]
        return
    with all_tenants():
        yield sorted(list_sharing(organizations=[organization_id]))


def give_own_share(*, organization: Organization | str) -> None:
    """Count the organization separately from now on."""
    organization_id = id_of(organization)
    sharing = Organization.objects.filter(pk=organization_id, has_own_share=False)
    if sharing.exists():  # some database roles that get here may not write it, and never need to
        sharing.update(has_own_share=True)
