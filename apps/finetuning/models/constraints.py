"""Constraints that several models share."""

from django.db import models
from django.db.models import Q


def paired(name: str, *fields: str) -> models.CheckConstraint:
    """Return the constraint that either all of these fields are null or none is."""
    nothing = Q(**dict.fromkeys(fields))
    everything = Q(**{f"{field}__isnull": False for field in fields})
    return models.CheckConstraint(name=name, condition=nothing | everything)
