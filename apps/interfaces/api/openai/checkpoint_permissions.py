"""/v1/fine_tuning/checkpoints/{model}/permissions: OpenAI's sharing of checkpoints between projects.

A checkpoint is visible as its job is: to the keys of its organization, and in a private project to the project's keys
alone. A single checkpoint has no permissions, so there is never one to list, and none can be made or deleted.
"""

from typing import Literal, TypedDict

import msgspec
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.core.errors import InvalidValue
from apps.finetuning.results.checkpoint_models import require_checkpoint
from apps.interfaces.api.requests.pagination import ListObject, PageQuery, list_object
from apps.interfaces.api.views import ApiView


class PermissionsQuery(PageQuery):
    order: Literal["ascending", "descending"] = "descending"
    project_id: str | None = None


class NewPermissions(msgspec.Struct, forbid_unknown_fields=True):
    project_ids: list[str]


class PermissionObject(TypedDict):
    id: str
    object: Literal["checkpoint.permission"]
    created_at: int
    project_id: str


class DeletedPermission(TypedDict):
    id: str
    object: Literal["checkpoint.permission"]
    deleted: Literal[True]


class CheckpointPermissions(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.ADAPTER_WRITE}
    examples = {"POST": {"project_ids": ["proj_abc"]}}

    def get(self, request: Request, model: str, query: PermissionsQuery) -> ListObject[PermissionObject]:
        """List the permissions of a checkpoint: none, because it is visible as its job's project is."""
        require_checkpoint(organization=self.organization, model_name=model)
        return list_object([])

    def post(self, request: Request, model: str, body: NewPermissions) -> ListObject[PermissionObject]:
        """Refuse to share a checkpoint, with the reason."""
        require_checkpoint(organization=self.organization, model_name=model)
        raise _not_offered("project_ids")


class CheckpointPermission(ApiView):
    required_scope = {"DELETE": Permission.ADAPTER_WRITE}

    def delete(self, request: Request, model: str, permission_id: str) -> DeletedPermission:
        """Refuse, because a checkpoint has no permissions."""
        require_checkpoint(organization=self.organization, model_name=model)
        raise _not_offered("permission_id")


def _not_offered(param: str) -> InvalidValue:
    text = (
        "Anneal does not offer permissions of single checkpoints. A checkpoint is visible as its job is: to the keys "
        "of your organization, and in a private project to the keys of that project alone."
    )
    return InvalidValue(text, param=param, code="not_offered")
