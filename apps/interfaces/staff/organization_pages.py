"""Pages of the organizations of this installation, which several lists of the console show in columns of their own."""

from dataclasses import dataclass
from urllib.parse import urlencode

from django.core.paginator import Page, Paginator
from django.db.models import Q
from django.http import HttpRequest

from apps.accounts.models import Organization

_ROWS = 50
_MAX_QUERY_CHARACTERS = 80


@dataclass(frozen=True)
class OrganizationPage:
    """One page of the organizations whose name, slug or id contains what the operator searched for."""

    page: Page
    query: str

    @property
    def rows(self) -> list[Organization]:
        return list(self.page.object_list)

    @property
    def ids(self) -> list[str]:
        return [each.pk for each in self.rows]

    @property
    def context(self) -> dict[str, object]:
        """What the head and the foot of the list show; `previous` and `next` are "" where there is no such page."""
        before = self.page.previous_page_number() if self.page.has_previous() else None
        after = self.page.next_page_number() if self.page.has_next() else None
        addresses = {
            name: f"?{urlencode({'q': self.query, 'page': number})}" if number else ""
            for name, number in (("previous", before), ("next", after))
        }
        return {"page": self.page, "q": self.query, **addresses}


def read_organizations(request: HttpRequest) -> OrganizationPage:
    """Return the page that the request asks for with `q` and `page`, by name."""
    query = request.GET.get("q", "").strip()[:_MAX_QUERY_CHARACTERS]
    matches = Q(name__icontains=query) | Q(slug__icontains=query) | Q(pk__icontains=query)
    rows = Organization.objects.filter(matches).order_by("name", "pk")
    return OrganizationPage(Paginator(rows, _ROWS).get_page(request.GET.get("page")), query)
