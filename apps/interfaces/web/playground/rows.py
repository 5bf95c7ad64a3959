"""Actions on a playground conversation: show the prompt as the model reads it, save an answer as a row."""

import json
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from django.http import JsonResponse
from django.urls import reverse
from django.utils.translation import gettext
from django.views.decorators.http import require_POST

from apps.accounts.models import Organization
from apps.accounts.roles import Permission
from apps.adapters.queries import get_version_by_name
from apps.catalog.models import BaseModel
from apps.catalog.queries import chat_renderer, list_base_models
from apps.contracts.chat import ChatMessage, MessageRole, RowError, RowKind, parse_row_as
from apps.core.database.clock import db_now
from apps.core.database.locks import lock
from apps.core.errors import DomainError, InvalidJson, InvalidState, InvalidValue
from apps.core.http.json_bodies import decode_body, json_of
from apps.core.messages.translation import translated
from apps.core.objects.store import read_object
from apps.datasets.intake.versions import create_version
from apps.datasets.lifecycle import UNVALIDATED, DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.queries import list_versions
from apps.interfaces.web.shell.access import OrganizationRequest, organization_view
from apps.interfaces.web.shell.code_samples import request_samples
from apps.interfaces.web.shell.current_project import project_of_new_work
from apps.serving.aliases import list_aliases

_DATASETS = {RowKind.CHAT: "Playground rows", RowKind.PREFERENCE: "Playground preferences"}
_MAX_BYTES = 8 * 2**20  # of the dataset of saved rows; beyond it, start another dataset

_Text = Annotated[str, msgspec.Meta(max_length=100_000)]


class SavedTurn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: _Text


class Conversation(msgspec.Struct, forbid_unknown_fields=True):
    messages: Annotated[list[SavedTurn], msgspec.Meta(min_length=1, max_length=200)]
    model: Annotated[str, msgspec.Meta(max_length=240)] = ""
    rejected: _Text = ""  # another model's answer to the same messages, which the last message is preferred to


_decoder = msgspec.json.Decoder(Conversation)
_any_body = msgspec.json.Decoder(dict[str, object])


@require_POST
@organization_view(Permission.VIEW)
def render_prompt(request: OrganizationRequest) -> JsonResponse:
    """Return the text that the model's own chat template makes of the messages."""
    try:
        asked = decode_body(json_of(request), _decoder)
        messages = [ChatMessage(role=MessageRole(turn.role), content=turn.content) for turn in asked.messages]
        prompt = chat_renderer(base_model=_base_of(request.organization, asked.model)).render_prompt(messages)
    except DomainError as refused:
        return JsonResponse(refused.as_openai(), status=refused.status)
    return JsonResponse({"prompt": prompt})


@require_POST
@organization_view(Permission.VIEW)
def copy_as(request: OrganizationRequest) -> JsonResponse:
    """Return the code that sends the request of the body, by language."""
    try:
        body = decode_body(json_of(request), _any_body)
        return JsonResponse({one["key"]: one["code"] for one in request_samples(body)})
    except RecursionError:
        refused: DomainError = InvalidJson(gettext("The body is nested too deeply. Flatten it."))
    except DomainError as error:
        refused = error
    return JsonResponse(refused.as_openai(), status=refused.status)


@require_POST
@organization_view(Permission.DATASET_WRITE)
def save_row(request: OrganizationRequest) -> JsonResponse:
    """Add the conversation, which ends with the answer, as a row to the next version of the dataset of saved rows.

    With a rejected answer, add a preference between the two to a dataset of preferences.
    """
    try:
        asked = decode_body(json_of(request), _decoder)
        kind = RowKind.PREFERENCE if asked.rejected else RowKind.CHAT
        version = _append(request, _row_of(asked, kind), kind)
    except DomainError as refused:
        return JsonResponse(refused.as_openai(), status=refused.status)
    url = reverse("web:dataset_detail", args=[version.pk])
    return JsonResponse({"file": version.pk, "url": url, "dataset": version.dataset.name})


def _row_of(asked: Conversation, kind: RowKind) -> bytes:
    """Return the line of the row. Raises InvalidValue, which names the faulty place, if it cannot be trained."""
    messages = msgspec.to_builtins(asked.messages)
    row: dict[str, object] = {"messages": messages}
    if kind is RowKind.PREFERENCE:
        row = {
            "input": {"messages": messages[:-1]},
            "preferred_output": messages[-1:],
            "non_preferred_output": [{"role": "assistant", "content": asked.rejected}],
        }
    line = json.dumps(row, ensure_ascii=False).encode()
    try:
        parse_row_as(line, kind, line_number=1)
    except RowError as error:
        raise InvalidValue(f"{translated(error.message)} {translated(error.fix)}", param=error.param) from error
    return line


def _append(request: OrganizationRequest, row: bytes, kind: RowKind) -> DatasetVersion:
    organization, project = request.organization, project_of_new_work(request)
    lock(f"playground rows:{organization.pk}")
    name = _DATASETS[kind]
    versions = list_versions(organization=organization).filter(dataset__name=name, dataset__project=project)
    before = versions.order_by("-number").first()
    filename = f"{name.lower().replace(' ', '-')}.jsonl"
    if before is not None:
        _require_rows(before, filename)

    def chunks() -> Iterator[bytes]:
        if before is not None:
            kept = read_object(before.data_key, limit_bytes=_MAX_BYTES)
            yield kept if kept.endswith(b"\n") else kept + b"\n"
        yield row + b"\n"

    return create_version(
        organization=organization,
        filename=filename,
        purpose="fine-tune",
        chunks=chunks(),
        by=request.membership.user_id,
        now=db_now(),
        dataset_name=name,
        project=project.pk,
    )


def _require_rows(before: DatasetVersion, filename: str) -> None:
    """Raise InvalidState unless the file is of rows to which one can be added: one saved here may still be unread."""
    names = {"filename": before.filename, "dataset": before.dataset.name}
    is_saved_here = before.filename == filename and before.derived_from_id is None
    if before.status in UNVALIDATED and not is_saved_here:
        raise InvalidState(
            gettext("%(filename)s, the newest file of %(dataset)s, is still being read. Save the row in a few seconds.")
            % names
        )
    if before.status == DatasetVersionStatus.INVALID and before.layout.is_rejected:
        raise InvalidState(
            gettext("%(filename)s, the newest file of %(dataset)s, has no rows. Delete it, then save the row again.")
            % names
        )
    if before.data_bytes > _MAX_BYTES:
        raise InvalidState(
            gettext(
                "%(dataset)s is full: rows are added to files of up to %(limit)s. Delete its files, or choose another "
                "project, then save the row again."
            )
            % (names | {"limit": f"{_MAX_BYTES // 2**20} MiB"})
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
