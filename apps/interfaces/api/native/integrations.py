"""/api/v1/integrations: the organization's keys of experiment trackers. A stored key is never shown."""

from typing import Literal, TypedDict

import msgspec
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.finetuning.models import TrackerKey
from apps.finetuning.runs.trackers import list_tracker_keys, remove_tracker_key, store_tracker_key
from apps.interfaces.api.requests.pagination import ListObject, list_object
from apps.interfaces.api.views import ApiView


class StoreKey(msgspec.Struct, forbid_unknown_fields=True):
    """`key` is W&B's key or MLflow's token; `url` is that of the MLflow tracking server."""

    key: str
    url: str = ""


class IntegrationObject(TypedDict):
    object: Literal["integration"]
    type: str
    url: str | None
    key_hint: str
    updated_at: int
    updated_by: str


class DeletedIntegration(TypedDict):
    object: Literal["integration"]
    type: str
    deleted: Literal[True]


class IntegrationList(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request) -> ListObject[IntegrationObject]:
        """List the trackers with a stored key."""
        return list_object([_object(row) for row in list_tracker_keys(organization=self.organization)])


class IntegrationDetail(ApiView):
    required_scope = {"PUT": Permission.JOB_WRITE, "DELETE": Permission.JOB_WRITE}
    examples = {"PUT": {"key": "0123456789abcdef"}}

    def put(self, request: Request, kind: str, body: StoreKey) -> IntegrationObject:
        """Store the key of a tracker, `wandb` or `mlflow`."""
        row = store_tracker_key(
            organization=self.organization, kind=kind, secret=body.key, url=body.url, by=self.actor, now=db_now()
        )
        return _object(row)

    def delete(self, request: Request, kind: str) -> DeletedIntegration:
        """Remove the key of a tracker."""
        remove_tracker_key(organization=self.organization, kind=kind, by=self.actor)
        return {"object": "integration", "type": kind, "deleted": True}


def _object(row: TrackerKey) -> IntegrationObject:
    return {
        "object": "integration",
        "type": row.kind,
        "url": row.url or None,
        "key_hint": row.hint,
        "updated_at": int(row.updated_at.timestamp()),
        "updated_by": row.updated_by,
    }
