"""Search by name and id over a few kinds of rows, each kind bounded: what the command palette asks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

MIN_CHARACTERS = 2
_MAX_CHARACTERS = 80
_MAX_WORDS = 5
_SHOWN = 5  # of each kind


@dataclass(frozen=True)
class Hit:
    label: str
    detail: str
    url: str


@dataclass(frozen=True)
class Kind:
    """One kind of object: its rows, the fields to look in, and how a row is shown."""

    label: str
    icon: str
    rows: QuerySet
    fields: tuple[str, ...]
    show: Callable[..., Hit]

    def find(self, words: list[str]) -> list[Hit]:
        """Return the first rows in which each word stands somewhere, in the order of `rows`."""
        each = (reduce(or_, (Q(**{f"{field}__icontains": word}) for field in self.fields)) for word in words)
        return [self.show(row) for row in self.rows.filter(reduce(and_, each))[:_SHOWN]]


def render_hits(request: HttpRequest, kinds: list[Kind], *, prefix: str) -> HttpResponse:
    """Answer with the groups that match `q`; nothing below `MIN_CHARACTERS`. Ids on the page begin with `prefix`."""
    text = request.GET.get("q", "").strip()[:_MAX_CHARACTERS]
    words = text.split()[:_MAX_WORDS] if len(text) >= MIN_CHARACTERS else []
    groups = [(kind, hits) for kind in kinds if (hits := kind.find(words))] if words else []
    return render(request, "search/results.html", {"groups": groups, "prefix": prefix})
