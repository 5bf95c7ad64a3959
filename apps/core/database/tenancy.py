"""Tenant isolation: the rows each role may see, enforced by PostgreSQL.

Each process logs in under a role that is neither superuser nor BYPASSRLS. Under `anneal_app` a row is visible only
while `anneal.organization` names its organization (or `anneal.user` its member). Both are set inside the transaction,
so a pooled connection carries nothing over. `anneal_sys` sees all tenants by an explicit policy.
apps/core/database/policies.py writes policies and grants after each migration from attributes of the models.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self

from django.db import connection, models, transaction

from apps.core.database.policies import APP_ROLE, OWN_ORGANIZATION, SYSTEM_ROLE


class Keyed(Protocol):
    """A row, or an anonymous user."""

    @property
    def pk(self) -> Any: ...


def id_of(row: Keyed | str | None) -> str:
    """Return the id of a row or of an id; return "" for None."""
    if row is None:
        return ""
    return row if isinstance(row, str) else str(row.pk)


class OrganizationQuerySet(models.QuerySet):
    def for_organization(self, organization: Keyed | str) -> Self:
        """Return only the organization's rows.

        This is a second check beside row-level security (see the module docstring).
        """
        return self.filter(organization_id=id_of(organization))


class OrganizationModel(models.Model):
    """A row that belongs to one organization."""

    organization = models.ForeignKey("accounts.Organization", on_delete=models.PROTECT, related_name="+")

    objects = OrganizationQuerySet.as_manager()

    tenant_condition = OWN_ORGANIZATION

    class Meta:
        abstract = True


def sum_by_organization(statement: str, **parameters: Any) -> Counter[str]:
    """Return the integer sums that a statement selects, by the organization's id.

    An organization without rows has 0.
    """
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return Counter(dict(cursor.fetchall()))


@contextmanager
def tenant(*, organization: Keyed | str | None = None, user: Keyed | str | None = None) -> Iterator[None]:
    """Run a transaction that sees one organization's rows and, for `user`, that person's own memberships."""
    with _acting(APP_ROLE, organization=id_of(organization), user=id_of(user)):
        yield


@contextmanager
def system() -> Iterator[None]:
    """Run a transaction that sees every tenant: operator pages, invitation tokens. The caller audits its actions."""
    with _acting(SYSTEM_ROLE, organization="", user=""):
        yield


@contextmanager
def all_tenants() -> Iterator[None]:
    """Show every tenant's rows, for sums over several tenants. Roles other than APP_ROLE see them anyway."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_user")
        (role,) = cursor.fetchone()
    if role != APP_ROLE:
        yield
        return
    with system():
        yield


def set_organization(organization: Keyed | str) -> None:
    """Set the organization for the rest of the current `tenant` block."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('anneal.organization', %s, true)", [id_of(organization)])


def refuse_writes() -> None:
    """Make the rest of the current transaction read-only. PostgreSQL raises ReadOnlySqlTransaction for a write."""
    with connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION READ ONLY")


@contextmanager
def _acting(role: str, *, organization: str, user: str) -> Iterator[None]:
    is_nested = connection.in_atomic_block
    with transaction.atomic():
        before = _identity() if is_nested else None
        _assume(role, organization, user)
        yield
        if before is not None:  # SET LOCAL outlives a savepoint that commits; a rollback restores it
            _assume(*before)


def _identity() -> tuple[str, str, str]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT current_user, coalesce(current_setting('anneal.organization', true), ''),"
            " coalesce(current_setting('anneal.user', true), '')"
        )
        return cursor.fetchone()


def _assume(role: str, organization: str, user: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT set_config('role', %s, true), set_config('anneal.organization', %s, true),"
            " set_config('anneal.user', %s, true)",
            [role, organization, user],
        )
