"""Resealing of stored secrets under the current SECRET_KEY. A BinaryField named `…_sealed` holds a secret."""

from collections.abc import Iterator

from django.apps import apps
from django.db import models, transaction

from apps.core.secrets.sealing import SealBroken, is_current, place_of, seal, unseal


def sealed_columns() -> Iterator[tuple[type[models.Model], str]]:
    """Yield every model and field that holds a sealed value."""
    for model in apps.get_models():
        for field in model._meta.concrete_fields:
            if isinstance(field, models.BinaryField) and field.name.endswith("_sealed"):
                yield model, field.name


@transaction.atomic
def reseal_columns() -> int:
    """Reseal the values of all columns that are sealed under an older key; return how many.

    If a value cannot be unsealed, raises SealBroken and changes nothing.
    """
    return sum(_reseal(model, column) for model, column in sealed_columns())


def resealed(sealed: bytes, *, place: bytes, owner: str) -> bytes | None:
    """Return the value sealed under the current SECRET_KEY; None if it already is.

    Raises SealBroken, which names the `owner`.
    """
    if is_current(sealed):
        return None
    try:
        return seal(unseal(sealed, place=place), place=place)
    except SealBroken as broken:
        raise SealBroken(f"{owner}: {broken}") from broken


def _reseal(model: type[models.Model], column: str) -> int:
    count, table = 0, model._meta.db_table
    for row in model._default_manager.exclude(**{column: None}).select_for_update().only("pk", column):
        place = place_of(table=table, column=column, row_id=row.pk)
        sealed = resealed(bytes(getattr(row, column)), place=place, owner=f"{table} {row.pk}")
        if sealed is not None:
            model._default_manager.filter(pk=row.pk).update(**{column: sealed})
            count += 1
    return count
