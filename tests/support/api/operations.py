"""Cases for every operation of the OpenAPI document that name what exists."""

from typing import Any

from tests.guards.makers.tenants import Tenant
from tests.guards.urls import URLS
from tests.guards.world import MAKERS, SHARED


def ids_of(operation: str, tenant: Tenant) -> dict[str, str]:
    """Return what exists for the parts of an operation's address and the members of its body that name an object.

    `operation` is its id, such as `job_detail_get`.
    """
    url = URLS.get(f"api_{operation.rpartition('_')[0]}")
    named = {**url.ids, **url.refs} if url else {}
    return {
        name: tenant.ids[kind] if kind in MAKERS else SHARED[kind](tenant.installation) for name, kind in named.items()
    }


def with_ids(case: Any, ids: dict[str, str]) -> Any:
    """Return a case of schemathesis that names what exists."""
    case.path_parameters = {**(case.path_parameters or {}), **_known(case.path_parameters, ids)}
    if isinstance(case.body, dict):
        case.body = case.body | _known(case.body, ids)
    return case


def _known(given: Any, ids: dict[str, str]) -> dict[str, str]:
    return {name: ids[name] for name in given or () if name in ids}
