"""/api/v1/models/{model}/pushes: pushes of a model's files to a repository of the customer on the operator's hub."""

from typing import Annotated, Literal, TypedDict

import msgspec
from django.conf import settings
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.finetuning.models import HubPush
from apps.finetuning.results.hub_pushes import list_pushes, request_push
from apps.interfaces.api.requests.pagination import ListObject, PageQuery, page
from apps.interfaces.api.requests.times import unix_seconds
from apps.interfaces.api.views import ApiView
from apps.serving.aliases import get_exact_version


class PushBody(msgspec.Struct, forbid_unknown_fields=True):
    """`token` is a token of the hub that may write to the repository. It is used for this push, and then erased."""

    repository: Annotated[str, Meta(description="owner/name, as on the hub.")]
    token: str
    export: Annotated[str, Meta(description="merged_16bit or gguf; empty: the adapter.")] = ""


class PushObject(TypedDict):
    """`status` is `waiting`, `running`, `succeeded` or `failed`; `problem` is why the last attempt failed."""

    object: Literal["model.push"]
    id: str
    model: str
    export: str | None
    repository: str
    url: str
    status: str
    commit: str | None
    problem: str | None
    created_at: int
    ended_at: int | None


class ModelPushes(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.ADAPTER_WRITE}
    examples = {"POST": {"repository": "acme/support", "token": "hf_...", "export": "gguf"}}

    def get(self, request: Request, model: str, query: PageQuery) -> ListObject[PushObject]:
        """List the pushes of a fine-tuned model, newest first."""
        version = get_exact_version(organization=self.organization, model_name=model)
        return page(query, list_pushes(version=version), lambda push: _object(model, push))

    def post(self, request: Request, model: str, body: PushBody) -> PushObject:
        """Push the files of a fine-tuned model, or of its export, with its card to a repository on the hub.

        A repository that does not exist is made, as a private one.
        """
        version = get_exact_version(organization=self.organization, model_name=model)
        push = request_push(
            version=version,
            export=body.export,
            repository=body.repository,
            token=body.token,
            by=self.actor,
            now=db_now(),
        )
        return _object(model, push)


def _object(model: str, push: HubPush) -> PushObject:
    return {
        "object": "model.push",
        "id": push.pk,
        "model": model,
        "export": push.export or None,
        "repository": push.repository,
        "url": f"{settings.HUB_URL}/{push.repository}",
        "status": push.status,
        "commit": push.commit or None,
        "problem": push.problem or None,
        "created_at": int(push.created_at.timestamp()),
        "ended_at": unix_seconds(push.ended_at),
    }
