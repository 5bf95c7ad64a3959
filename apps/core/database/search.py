"""Search by name and id over a few kinds of rows, with a limit for each kind. Used by the command palette."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Protocol, TypeVar

from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from apps.core.database.keyset import first_rows
from apps.core.database.read_times import counted_read

MIN_CHARACTERS = 2
_MAX_CHARACTERS = 80
_MAX_WORDS = 5
SHOWN = 5  # per kind
_Row = TypeVar("_Row", bound=Model)


@dataclass(frozen=True)
class Hit:
    label: str
    detail: str
    url: str


class Searched(Protocol):
    """A group of objects that the palette searches."""

    @property
    def label(self) -> str: ...
    @property
    def icon(self) -> str: ...
    def find(self, words: list[str]) -> list[Hit]: ...


@dataclass(frozen=True)
class HitKind:
    """One kind of object: its rows, the fields to search, and the display of a row."""

    label: str
    icon: str
    rows: QuerySet
    fields: tuple[str, ...]
    show: Callable[..., Hit]

    def find(self, words: list[str]) -> list[Hit]:
        """Return the first rows that contain every word, each in any of the fields, in the order of `rows`."""
        with counted_read():
            found = first_rows(with_words(self.rows, words, self.fields), SHOWN)
        return [self.show(row) for row in found]


def with_words(rows: QuerySet[_Row], words: Iterable[str], fields: Sequence[str]) -> QuerySet[_Row]:
    """Return the rows that contain every word, each in any of the fields."""
    each = (reduce(or_, (_containing(rows.model, field, word) for field in fields)) for word in words)
    return rows.filter(reduce(and_, each, Q()))


def _containing(model: type[Model], field: str, word: str) -> Q:
    """Return the condition that a field, of the rows or of related ones, contains a word.

    Related rows are matched separately. With a join, all rows would be read before the first is found (see
    `first_rows`).
    """
    relation, _, rest = field.partition("__")
    if not rest:
        return Q(**{f"{field}__icontains": word})
    related = model._meta.get_field(relation).related_model
    assert isinstance(related, type)
    found = related._default_manager.filter(_containing(related, rest, word))
    return Q(**{f"{relation}__in": found.values("pk")})


def render_hits(request: HttpRequest, kinds: Sequence[Searched], *, prefix: str) -> HttpResponse:
    """Return a response with the groups that match `q`.

    It has no groups if `q` is shorter than `MIN_CHARACTERS`. Ids on the page begin with `prefix`.
    """
    text = request.GET.get("q", "").strip()[:_MAX_CHARACTERS]
    words = text.split()[:_MAX_WORDS] if len(text) >= MIN_CHARACTERS else []
    groups = [(kind, hits) for kind in kinds if (hits := kind.find(words))] if words else []
    return render(request, "shell/search.html", {"groups": groups, "prefix": prefix})
