"""The settings of a project, and what they choose for a new fine-tune where its request names nothing."""

from dataclasses import replace

from django.utils.translation import gettext

from apps.accounts.members.projects import ProjectChange, change_project, get_project
from apps.accounts.models import Organization, Project, User
from apps.catalog.queries import list_base_models
from apps.contracts.hyperparameters import Method
from apps.core.errors import InvalidValue, MissingParameter
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.queries import names_of_pools
from apps.finetuning.recipes.limits import get_limits
from apps.finetuning.recipes.start_points import find_start_point
from apps.finetuning.recipes.suffixes import plain_suffix

# What a project can choose, by the names of OpenAI's API and ours, with the fields of a request.
_CHOSEN = {"model": "base_model", "method": "method", "suffix": "suffix"}


def change_project_settings(*, organization: Organization, id: str, change: ProjectChange, by: User) -> Project:
    """Change a project as `change_project` does, also what is chosen for its new fine-tunes.

    An empty default is none. Raises InvalidValue as well for another model that is not installed, another pool that
    is unknown, closed or in a region that the organization may not use, an unknown method and a suffix without letters
    and digits.
    """
    project = get_project(organization=organization, id=id)  # what it keeps may be gone since
    model = change.default_model
    if model not in (None, "", project.default_model) and not _is_installed(model):
        raise InvalidValue(gettext("Choose a base model that is installed."), param="default_model")
    if change.default_pool not in (None, "", project.default_pool, *names_of_pools(organization=organization)):
        raise InvalidValue(gettext("There is no such pool."), param="default_pool")
    if change.default_method and change.default_method not in list(Method):
        text = gettext("The method must be one of %(methods)s.") % {"methods": ", ".join(Method)}
        raise InvalidValue(text, param="default_method")
    if change.default_suffix is not None:
        change = replace(change, default_suffix=plain_suffix(change.default_suffix, param="default_suffix"))
    return change_project(organization=organization, id=id, change=change, by=by)


def with_defaults(*, request: JobRequest, project: Project) -> JobRequest:
    """Return the request with what its project chooses where it names nothing.

    A method that the model does not have is left to us, as a pool is that cannot run the job. Raises MissingParameter
    if neither names a model, InvalidValue if the project's is not installed any more, and what `find_start_point`
    raises.
    """
    model = request.base_model or _model_of(project)
    return replace(
        request,
        base_model=model,
        method=request.method or _method_of(project, model),
        suffix=(project.default_suffix or None) if request.suffix is None else request.suffix,
        preferred_pool=project.default_pool if request.pool is None else "",
    )


def chosen_by_project(*, asked: JobRequest, request: JobRequest, pool: str | None) -> list[str]:
    """Return what `with_defaults` chose, by its name in the API; the pool if the job would start in it."""
    found = [name for name, field in _CHOSEN.items() if getattr(asked, field) != getattr(request, field)]
    return [*found, *(["pool"] if pool and pool == request.preferred_pool else [])]


def _model_of(project: Project) -> str:
    if not project.default_model:
        text = gettext("'model' is missing, and the project %(name)s has no base model of its own. Send it.")
        raise MissingParameter(text % {"name": project.name}, param="model")
    if not _is_installed(project.default_model):
        text = gettext(
            "The project %(name)s uses the base model %(model)s, which is no longer installed. Send 'model', or "
            "choose another one for the project."
        )
        raise InvalidValue(text % {"name": project.name, "model": project.default_model}, param="model")
    return project.default_model


def _is_installed(model: str) -> bool:
    return list_base_models(only_installed=True).filter(name=model).exists()


def _method_of(project: Project, model: str) -> Method | None:
    if not project.default_method:
        return None
    start = find_start_point(organization=project.organization_id, model=model)
    method = Method(project.default_method)
    if start.shape and method is Method.FULL:  # an adapter is continued as one
        return None
    return method if any(kind.method is method for kind in get_limits(base_model=start.base_model).kinds) else None
