"""What a world of world.py holds, and what guards ask of it: the rows of a tenant, and to undo a request."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from django.apps import apps
from django.db import connection, models, transaction

from apps.accounts.models import Organization, User
from apps.accounts.roles import SCOPES
from apps.catalog.models import BaseModel
from apps.finetuning.models import GpuPool, Worker
from tests.factories.accounts import make_key


@dataclass
class Installation:
    """What all tenants share."""

    base_model: BaseModel
    listed_model: BaseModel
    pool: GpuPool
    worker: Worker


@dataclass
class Tenant:
    """An organization, a person of each role, a key, and the id of one object of each kind."""

    organization: Organization
    people: dict[str, User]
    installation: Installation
    canary: str
    secret: str  # of a key of its owner with every scope
    ids: dict[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> User:
        return self.people["owner"]


@dataclass
class World:
    installation: Installation
    acme: Tenant
    rival: Tenant
    operator: User
    loner: User


def narrow_secret(tenant: Tenant, *, without: str) -> str:
    """Return a new key of the tenant's owner with every scope but one."""
    return make_key(tenant.organization, tenant.owner, scopes=frozenset(SCOPES) - {without}).secret


@contextmanager
def undone() -> Iterator[None]:
    """Undo all changes made inside, so that one request does not change the world of the next."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def rows_of(tenant: Tenant) -> dict[str, str]:
    """Return every row that belongs to a tenant as JSON, by the model's label, to compare before and after."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('role', 'anneal_owner', true)")
        cursor.execute("SELECT count(*) FROM pg_prepared_statements WHERE name = 'rows_of'")
        if not cursor.fetchone()[0]:
            cursor.execute(f"PREPARE rows_of(text) AS {_rows_query()}")  # planning takes longer than running
        cursor.execute("EXECUTE rows_of(%s)", [tenant.organization.pk])
        return dict(cursor.fetchall())


def _rows_query() -> str:
    return " UNION ALL ".join(
        f"SELECT '{model._meta.label}', jsonb_agg(to_jsonb(each) ORDER BY each.{model._meta.pk.column})::text"
        f" FROM {model._meta.db_table} AS each WHERE each.organization_id = $1"
        for model in tenant_models()
    )


def tenant_models() -> list[type[models.Model]]:
    """Return the models with an organization, in a stable order."""
    return sorted(
        (model for model in apps.get_models() if any(f.name == "organization" for f in model._meta.fields)),
        key=lambda model: model._meta.label,
    )
