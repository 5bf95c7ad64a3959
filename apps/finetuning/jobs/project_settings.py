"""The settings of a project, with what its new fine-tunes begin with in the dashboard."""

from django.utils.translation import gettext

from apps.accounts.members.projects import change_project, get_project
from apps.accounts.models import Organization, Project, User
from apps.catalog.queries import list_base_models
from apps.core.errors import InvalidValue
from apps.finetuning.queries import names_of_pools


def change_project_settings(
    *,
    organization: Organization,
    id: str,
    by: User,
    name: str | None = None,
    is_private: bool | None = None,
    default_model: str | None = None,
    default_pool: str | None = None,
) -> Project:
    """Change a project as `change_project` does, also the base model and the pool that the wizard offers first.

    None stays, and "" is none. Raises InvalidValue as well for a model that is not installed and a pool
    that is unknown, closed or in a region that the organization may not use.
    """
    if default_model and not list_base_models(only_installed=True).filter(name=default_model).exists():
        raise InvalidValue(gettext("Choose a base model that is installed."), param="default_model")
    kept = get_project(organization=organization, id=id).default_pool  # it may have closed since
    if default_pool and default_pool != kept and default_pool not in names_of_pools(organization=organization):
        raise InvalidValue(gettext("There is no such pool."), param="default_pool")
    return change_project(
        organization=organization, id=id, by=by, name=name, is_private=is_private, default_model=default_model,
        default_pool=default_pool,
    )  # fmt: skip
