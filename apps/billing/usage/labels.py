"""Labels of keys, to which what their requests cost is charged. The key of a judge has those of the key of its job."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import TypeVar

from django.db.models import Case, CharField, F, OuterRef, QuerySet, Subquery, When

from apps.accounts.models import ApiKey, KeyKind, Organization
from apps.billing.models import KeyLabel

Row = TypeVar("Row")

_ROWS_AT_ONCE = 1000
LABELLED_KEY = Case(  # of an ApiKey: the key whose labels it has
    When(kind=KeyKind.MEMBER, made_with__gt="", then=F("made_with")), default=F("pk"), output_field=CharField()
)
LABELLED_KEY_SQL = f"CASE WHEN key.kind = '{KeyKind.MEMBER}' AND key.made_with > '' THEN key.made_with ELSE key.id END"


def with_keys(
    rows: Iterator[Row], *, organization: Organization | str, key_of_row: Callable[[Row], str]
) -> Iterator[tuple[Row, str, dict[str, str]]]:
    """Yield each row with the creator and the labels of its key, reading the keys of a thousand rows at once."""
    while part := list(islice(rows, _ROWS_AT_ONCE)):
        keys = ApiKey.objects.for_organization(organization).filter(pk__in={key_of_row(row) for row in part})
        found = {
            key_id: (creator, labelled)
            for key_id, creator, labelled in keys.values_list("pk", "created_by_id", LABELLED_KEY)
        }
        labels = labels_of_keys(organization=organization, ids={each for _, each in found.values()})
        for row in part:
            creator, key_id = found.get(key_of_row(row), ("", ""))
            yield row, creator or "", dict(labels.get(key_id, {}))


def labels_of_keys(*, organization: Organization | str, ids: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the labels of each of these keys, by name; a key without labels has no entry."""
    labels: dict[str, dict[str, str]] = defaultdict(dict)
    rows = KeyLabel.objects.for_organization(organization).filter(key_id__in=ids)
    for label in rows.order_by("key_id", "name"):
        labels[label.key_id][label.name] = label.value
    return dict(labels)


def label_by_key(*, organization: Organization | str, name: str) -> "QuerySet[ApiKey, tuple[str, str | None]]":
    """Return the keys, each with the value of its label `name` or None, as rows of a statement."""
    named = KeyLabel.objects.for_organization(organization).filter(name=name, key_id=OuterRef("labelled"))
    keys = ApiKey.objects.for_organization(organization).annotate(labelled=LABELLED_KEY)
    return keys.values_list("pk", Subquery(named.values("value")))
