"""Regions: the places of machines and of the object store, and those where an organization's data may be."""

from collections.abc import Collection

from django.db import models
from django.db.models import Q


class Region(models.Model):
    """A place that data of some organizations may not leave. Operators name them; none is ever removed."""

    name = models.CharField(max_length=40, primary_key=True)
    is_home = models.BooleanField(
        default=False, help_text="Of one: the object store, the database and the gateways are there."
    )

    tenancy_reason = "regions are shared by all tenants"
    app_access = "read"

    class Meta:
        constraints = [models.UniqueConstraint(fields=["is_home"], condition=Q(is_home=True), name="region_home_once")]

    def __str__(self) -> str:
        return self.name


def home_region() -> str:
    """Return the region of the object store."""
    return Region.objects.values_list("pk", flat=True).get(is_home=True)


def is_allowed(regions: Collection[str] | None, region: str) -> bool:
    """Return whether an organization with these `regions` (None: any) may use resources in the region."""
    return regions is None or region in regions


def allowed_in(region: str, path: str = "organization__") -> Q:
    """Return the condition that an organization may use resources in the region.

    `path` is the path to the organization.
    """
    return Q(**{f"{path}regions": None}) | Q(**{f"{path}regions__contains": [region]})
