"""/v1/models: the base models on offer and the organization's own fine-tuned models. Others are never shown."""

from typing import Any, Literal, NotRequired, TypedDict

import msgspec
from rest_framework.request import Request

from apps.accounts.models import Organization
from apps.accounts.roles import Permission
from apps.adapters.models import AdapterVersion
from apps.adapters.queries import get_version_by_name, list_versions
from apps.catalog.models import BaseModel
from apps.catalog.queries import list_base_models
from apps.core.database.clock import db_now
from apps.core.errors import PermissionDenied
from apps.finetuning.models import Checkpoint
from apps.finetuning.queries import report_of
from apps.finetuning.recipes.checkpoint_names import find_named, name_of
from apps.interfaces.api.requests.pagination import ListObject, list_object
from apps.interfaces.api.views import ApiView
from apps.serving.aliases import list_aliases
from apps.serving.models import Alias
from apps.serving.operations import delete_model


class ModelObject(TypedDict):
    """OpenAI's model. A base model has `context_length`, an alias `alias_of`, a fine-tuned model the rest."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: NotRequired[int]
    parent: NotRequired[str]
    alias_of: NotRequired[str]
    status: NotRequired[str | None]
    status_reason: NotRequired[str | None]
    parity: NotRequired[dict[str, Any] | None]
    evaluation: NotRequired[dict[str, Any] | None]


class DeletedModel(TypedDict):
    id: str
    object: Literal["model"]
    deleted: Literal[True]


class ModelList(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request) -> ListObject[ModelObject]:
        """Return every usable model on one page, as OpenAI does, without the rows in a report that got worse."""
        bases = [_base_object(model) for model in list_base_models(only_installed=True)]
        versions = list_versions(organization=self.organization)
        tuned = [_tuned_object(version, self.organization, report=_without_rows(version)) for version in versions]
        named = [_alias_object(alias, self.organization) for alias in list_aliases(organization=self.organization)]
        return list_object(bases + tuned + named)


class ModelDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "DELETE": Permission.ADAPTER_DELETE}

    def get(self, request: Request, model: str) -> ModelObject:
        """Return one model by name. Names contain `:` and may contain `/`."""
        if base := _find_base(model):
            return _base_object(base)
        if alias := list_aliases(organization=self.organization).filter(model_name=model).first():
            return _alias_object(alias, self.organization)
        if checkpoint := find_named(self.organization, model):
            return _checkpoint_object(checkpoint, self.organization)
        version = get_version_by_name(organization=self.organization, model_name=model)
        report = report_of(version)
        return _tuned_object(version, self.organization, report=msgspec.to_builtins(report) if report else {})

    def delete(self, request: Request, model: str) -> DeletedModel:
        """Stop serving a fine-tuned model and delete its weights. Its name is never used again."""
        if _find_base(model):
            raise PermissionDenied("Base models belong to the platform and cannot be deleted.", param="model")
        delete_model(organization=self.organization, model_name=model, by=self.actor, now=db_now())
        return {"id": model, "object": "model", "deleted": True}


def _find_base(name: str) -> BaseModel | None:
    if "\x00" in name:
        return None
    return list_base_models(only_installed=True).filter(name=name).first()


def _base_object(model: BaseModel) -> ModelObject:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.created_at.timestamp()),
        "owned_by": model.repo.split("/")[0] if model.repo else "anneal",
        "context_length": model.context_length,
    }


def _alias_object(alias: Alias, organization: Organization) -> ModelObject:
    return {
        "id": alias.model_name,
        "object": "model",
        "created": int(alias.created_at.timestamp()),
        "owned_by": organization.slug,
        "parent": alias.adapter.base_model.name,
        "alias_of": alias.version.model_name,
    }


def _without_rows(version: AdapterVersion) -> dict[str, Any]:
    return {name: value for name, value in version.report.items() if name != "worse"}


def _tuned_object(version: AdapterVersion, organization: Organization, *, report: dict[str, Any]) -> ModelObject:
    return {
        "id": version.model_name,
        "object": "model",
        "created": int(version.created_at.timestamp()),
        "owned_by": organization.slug,
        "parent": version.adapter.base_model.name,
        "status": version.certificate_state,
        "status_reason": version.status_reason or None,
        "parity": version.parity or None,
        "evaluation": report or None,
    }


def _checkpoint_object(checkpoint: Checkpoint, organization: Organization) -> ModelObject:
    """Return the model that a checkpoint becomes once a request names it."""
    return {
        "id": name_of(checkpoint),
        "object": "model",
        "created": int(checkpoint.created_at.timestamp()),
        "owned_by": organization.slug,
        "parent": checkpoint.job.base_model.name,
        "status": None,
        "status_reason": "A checkpoint answers once a request names it.",
        "parity": None,
        "evaluation": None,
    }
