"""The list of all organizations, as the pages of organizations, quotas and books search, filter and sort it."""

from django.db.models import Q

from apps.accounts.models import Organization
from apps.billing.queries import with_credit
from apps.core.database.listing import NEWEST_FIRST, Filter, Listing
from apps.core.messages.translation import later

ORGANIZATIONS = Listing[Organization](
    name=later("organizations"),
    hint=later("Search by name or id"),
    url_name="staff:organization_list",
    export_url_name="staff:organization_export",
    searched=("name", "slug", "id"),
    filters={
        "standing": Filter(
            later("Standing"),
            {
                "": (later("All"), Q()),
                "suspended": (later("Suspended"), Q(suspended_at__isnull=False)),
                "empty": (later("Out of credit"), ~Q(pk__in=with_credit())),
            },
        )
    },
    orders={
        "": (later("By name"), ("name", "id")),
        "newest": NEWEST_FIRST[""],
        "oldest": NEWEST_FIRST["oldest"],
    },
)
