"""JSON columns, each of which holds one msgspec Struct."""

from typing import Any

import msgspec
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.expressions import Expression


class StructField(models.JSONField):
    """A column with a frozen Struct, decoded once when a row is read. Missing members get their defaults."""

    def __init__(self, struct: type[msgspec.Struct], **options: Any) -> None:
        self._struct = struct
        super().__init__(**options | {"default": struct})

    def from_db_value(self, value: str | None, expression: Expression, connection: BaseDatabaseWrapper) -> Any:
        return None if value is None else msgspec.json.decode(value, type=self._struct)

    def get_prep_value(self, value: object) -> object:
        return super().get_prep_value(msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value)

    def deconstruct(self) -> Any:
        """Describe the column for migrations, which treat it as plain JSON."""
        name, _, arguments, options = super().deconstruct()
        return name, "django.db.models.JSONField", arguments, options | {"default": dict}

    def clone(self) -> models.JSONField:  # type: ignore[override]  # migrations know plain JSON only
        _, _, arguments, options = self.deconstruct()
        return models.JSONField(*arguments, **options)
