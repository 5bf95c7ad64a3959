"""/api/v1/integrations: the organization's keys of experiment trackers. A stored key is never shown."""

import msgspec
from rest_framework.request import Request
from rest_framework.response import Response

from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.finetuning.models import TrackerKey
from apps.finetuning.runs.trackers import list_tracker_keys, remove_tracker_key, store_tracker_key
from apps.interfaces.api.requests.parsers import read_body
from apps.interfaces.api.views import ApiView


class StoreKey(msgspec.Struct, forbid_unknown_fields=True):
    """`key` is W&B's key or MLflow's token; `url` is that of the MLflow tracking server."""

    key: str
    url: str = ""


class IntegrationList(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request) -> Response:
        rows = list_tracker_keys(organization=self.organization)
        return Response({"object": "list", "data": [_object(row) for row in rows], "has_more": False})


class IntegrationDetail(ApiView):
    required_scope = {"PUT": Permission.JOB_WRITE, "DELETE": Permission.JOB_WRITE}

    def put(self, request: Request, kind: str) -> Response:
        asked = read_body(request.data, StoreKey)
        row = store_tracker_key(
            organization=self.organization, kind=kind, secret=asked.key, url=asked.url, by=self.actor, now=db_now()
        )
        return Response(_object(row))

    def delete(self, request: Request, kind: str) -> Response:
        remove_tracker_key(organization=self.organization, kind=kind, by=self.actor)
        return Response({"object": "integration", "type": kind, "deleted": True})


def _object(row: TrackerKey) -> dict[str, object]:
    return {
        "object": "integration",
        "type": row.kind,
        "url": row.url or None,
        "key_hint": row.hint,
        "updated_at": int(row.updated_at.timestamp()),
        "updated_by": row.updated_by,
    }
