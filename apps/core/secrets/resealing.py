"""Resealing of every stored secret under the current SECRET_KEY. A BinaryField named `…_sealed` holds a secret."""

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
def reseal_all() -> int:
    """Reseal all values that are sealed under an older key; return how many.

    If a value cannot be unsealed, raises SealBroken and changes nothing.
    """
    return sum(_reseal(model, column) for model, column in sealed_columns())


def move_sealed(source: type[models.Model], column: str, target: type[models.Model], target_column: str) -> None:
    """Copy the secrets of `source` to rows of `target` with the same primary key.

    Used by migrations. Raises SealBroken.
    """
    for row in source._default_manager.exclude(**{column: None}).only("pk", column):
        secret = unseal(getattr(row, column), place=place_of(table=source._meta.db_table, column=column, row_id=row.pk))
        place = place_of(table=target._meta.db_table, column=target_column, row_id=row.pk)
        target._default_manager.create(pk=row.pk, **{target_column: seal(secret, place=place)})


def _reseal(model: type[models.Model], column: str) -> int:
    count = 0
    for row in model._default_manager.exclude(**{column: None}).select_for_update().only("pk", column):
        sealed = bytes(getattr(row, column))
        if is_current(sealed):
            continue
        place = place_of(table=model._meta.db_table, column=column, row_id=row.pk)
        try:
            secret = unseal(sealed, place=place)
        except SealBroken as broken:
            raise SealBroken(f"{model._meta.db_table} {row.pk}: {broken}") from broken
        model._default_manager.filter(pk=row.pk).update(**{column: seal(secret, place=place)})
        count += 1
    return count
