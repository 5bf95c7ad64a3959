"""Actions on a playground conversation: show the prompt as the model reads it, save it as an evaluation row."""

import json
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from django.http import JsonResponse
from django.urls import reverse
from django.views.decorators.http import require_POST

from apps.accounts.models import Organization
from apps.accounts.roles import Permission
from apps.adapters.queries import get_version_by_name
from apps.catalog.models import BaseModel
from apps.catalog.queries import chat_renderer, list_base_models
from apps.contracts.chat import ChatMessage, MessageRole
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.errors import DomainError, InvalidValue
from apps.core.http.json_bodies import decode_body
from apps.core.objects.store import read_object
from apps.datasets.intake.versions import create_version
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import list_versions
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.serving.aliases import list_aliases

DATASET_NAME = "Playground rows"
_MAX_BYTES = 8 * 2**20  # of the dataset of saved rows; beyond it, start another dataset

_Text = Annotated[str, msgspec.Meta(max_length=100_000)]


class SavedTurn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: _Text


class Conversation(msgspec.Struct, forbid_unknown_fields=True):
    messages: Annotated[list[SavedTurn], msgspec.Meta(min_length=1, max_length=200)]
    model: Annotated[str, msgspec.Meta(max_length=240)] = ""


_decoder = msgspec.json.Decoder(Conversation)


@require_POST
@organization_view(Permission.VIEW)
def render_prompt(request: OrganizationRequest) -> JsonResponse:
    """Return the text that the model's own chat template makes of the messages."""
    try:
        asked = decode_body(request.body, _decoder)
        messages = [ChatMessage(role=MessageRole(turn.role), content=turn.content) for turn in asked.messages]
        prompt = chat_renderer(base_model=_base_of(request.organization, asked.model)).render_prompt(messages)
    except DomainError as refused:
        return JsonResponse(refused.as_openai(), status=refused.status)
    return JsonResponse({"prompt": prompt})


@require_POST
@organization_view(Permission.DATASET_WRITE)
def save_row(request: OrganizationRequest) -> JsonResponse:
    """Add the conversation, with the answer last, as a row to the next version of the dataset of saved rows."""
    try:
        asked = decode_body(request.body, _decoder)
        if asked.messages[-1].role != "assistant":
            raise InvalidValue("The last message must be the answer to keep.", param="messages")
        version = _append(request.organization, asked, by=request.membership.user_id)
    except DomainError as refused:
        return JsonResponse(refused.as_openai(), status=refused.status)
    return JsonResponse({"file": version.pk, "url": reverse("web:dataset_detail", args=[version.pk])})


def _append(organization: Organization, asked: Conversation, *, by: str) -> DatasetVersion:
    lock(f"playground rows:{organization.pk}")
    before = list_versions(organization=organization).filter(dataset__name=DATASET_NAME).order_by("-number").first()
    row = json.dumps({"messages": msgspec.to_builtins(asked.messages)}, ensure_ascii=False).encode() + b"\n"

    def chunks() -> Iterator[bytes]:
        if before is not None:
            kept = read_object(before.object_key, limit_bytes=_MAX_BYTES)
            yield kept if kept.endswith(b"\n") else kept + b"\n"
        yield row

    return create_version(
        organization=organization,
        filename="playground-rows.jsonl",
        purpose="fine-tune",
        chunks=chunks(),
        by=by,
        now=db_now(),
        dataset_name=DATASET_NAME,
    )


def _base_of(organization: Organization, model_name: str) -> BaseModel:
    """Return the base model behind the name of a base model, a version or an alias. Raises ModelNotFound."""
    base = list_base_models(only_installed=True).filter(name=model_name).first()
    if base is not None:
        return base
    alias = list_aliases(organization=organization).filter(model_name=model_name).first()
    if alias is not None:
        return alias.adapter.base_model
    return get_version_by_name(organization=organization, model_name=model_name).adapter.base_model
