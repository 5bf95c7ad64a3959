"""Labels of keys, to which what their requests cost is charged. The key of a judge has those of the key of its job."""

from collections import defaultdict

from django.db.models import Case, CharField, F, OuterRef, QuerySet, Subquery, When

from apps.accounts.models import ApiKey, KeyKind, Organization
from apps.billing.models import KeyLabel

LABELLED_KEY = Case(  # of an ApiKey: the key whose labels it has
    When(kind=KeyKind.MEMBER, made_with__gt="", then=F("made_with")), default=F("pk"), output_field=CharField()
)


def labels_of_keys(*, organization: Organization | str) -> dict[str, dict[str, str]]:
    """Return by key the values of its labels by their names. Keys without labels are left out."""
    labels: dict[str, dict[str, str]] = defaultdict(dict)
    rows = KeyLabel.objects.for_organization(organization)
    for row in rows:
        labels[row.key_id][row.name] = row.value
    keys = ApiKey.objects.for_organization(organization).annotate(labelled=LABELLED_KEY)
    for key_id, labelled in keys.filter(labelled__in=rows.values("key_id")).values_list("pk", "labelled"):
        labels[key_id] = labels[labelled]
    return dict(labels)


def values_of_label(*, organization: Organization | str, name: str) -> dict[str, str]:
    """Return by key the value of the label `name`. Keys without it are left out."""
    labels = labels_of_keys(organization=organization)
    return {key_id: pairs[name] for key_id, pairs in labels.items() if name in pairs}


def label_by_key(*, organization: Organization | str, name: str) -> "QuerySet[ApiKey, tuple[str, str | None]]":
    """Return the keys, each with the value of its label `name` or None, as rows of a statement."""
    named = KeyLabel.objects.for_organization(organization).filter(name=name, key_id=OuterRef("labelled"))
    keys = ApiKey.objects.for_organization(organization).annotate(labelled=LABELLED_KEY)
    return keys.values_list("pk", Subquery(named.values("value")))
