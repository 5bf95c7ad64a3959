"""/v1/chat/completions, read and changed: completions that were stored because their request said `store: true`."""

from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.batches.completions.models import StoredCompletion
from apps.batches.completions.operations import delete_completion, set_metadata
from apps.batches.completions.queries import (
    get_completion,
    list_completions,
    list_with_deleted,
    read_answer,
    read_request,
)
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.interfaces.api.requests.pagination import PAGE_BYTES, ListObject, PageQuery, list_object, page
from apps.interfaces.api.views import ApiView

Metadata = dict[str, str]
_MetadataFilter = Annotated[
    Metadata, Meta(description="`metadata[key]=value`, several times: completions that have all of these pairs.")
]


class CompletionsQuery(PageQuery):
    order: Literal["asc", "desc"] = "asc"
    model: Annotated[str, Meta(description="The model that answered.")] | None = None
    metadata: _MetadataFilter | None = None


class MessagesQuery(PageQuery):
    order: Literal["asc", "desc"] = "asc"


class UpdateCompletion(msgspec.Struct, forbid_unknown_fields=True):
    metadata: Metadata | None


class StoredCompletionObject(TypedDict):
    """OpenAI's chat completion, with the settings of its request. Log-probabilities are not stored."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    request_id: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]
    metadata: Metadata
    seed: int | None
    temperature: float | None
    top_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    tools: list[dict[str, Any]] | None
    tool_choice: Any
    response_format: dict[str, Any] | None
    input_user: str | None
    service_tier: None
    system_fingerprint: None


class DeletedCompletion(TypedDict):
    id: str
    object: Literal["chat.completion.deleted"]
    deleted: Literal[True]


class StoredMessageObject(TypedDict):
    """A message of the request. If it had parts, `content` is their text and `content_parts` has the parts."""

    id: str
    role: str
    content: str | None
    content_parts: list[dict[str, Any]] | None
    name: str | None
    tool_calls: list[dict[str, Any]] | None
    tool_call_id: str | None
    refusal: None


class StoredCompletionList(ApiView):
    required_scope = {"GET": Permission.VIEW}
    methods_of_gateway = ("POST",)

    def get(self, request: Request, query: CompletionsQuery) -> ListObject[StoredCompletionObject]:
        """List stored completions, oldest first unless `order` is `desc`."""
        found = list_completions(organization=self.organization, model_name=query.model, metadata=query.metadata)
        sign = "-" if query.order == "desc" else ""
        order = (f"{sign}created_at", f"{sign}id")
        places = list_with_deleted(organization=self.organization)
        return page(query, found, completion_object, order=order, most_bytes=PAGE_BYTES, places=places)


class StoredCompletionDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.INFERENCE, "DELETE": Permission.INFERENCE}
    examples = {"POST": {"metadata": {"topic": "billing"}}}

    def get(self, request: Request, completion_id: str) -> StoredCompletionObject:
        """Return a stored completion."""
        return completion_object(get_completion(organization=self.organization, id=completion_id))

    def post(self, request: Request, completion_id: str, body: UpdateCompletion) -> StoredCompletionObject:
        """Replace the metadata of a stored completion; null removes it."""
        completion = get_completion(organization=self.organization, id=completion_id)
        return completion_object(set_metadata(completion=completion, metadata=body.metadata or {}, by=self.actor))

    def delete(self, request: Request, completion_id: str) -> DeletedCompletion:
        """Delete a stored completion for good."""
        completion = get_completion(organization=self.organization, id=completion_id)
        delete_completion(completion=completion, by=self.actor, now=db_now())
        return {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}


class StoredCompletionMessages(ApiView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, completion_id: str, query: MessagesQuery) -> ListObject[StoredMessageObject]:
        """List the messages of a stored completion's request, in their order unless `order` is `desc`."""
        completion = get_completion(organization=self.organization, id=completion_id)
        messages = [
            _message_object(f"{completion.pk}-{number}", message)
            for number, message in enumerate(read_request(completion)["messages"])
        ]
        if query.order == "desc":
            messages.reverse()
        first = 0
        if query.after is not None:
            places = [place for place, message in enumerate(messages) if message["id"] == query.after]
            if not places:
                raise InvalidValue(f"No such message: {query.after[:64]}.", param="after")
            first = places[0] + 1
        shown = messages[first : first + query.limit]
        return list_object(shown, has_more=first + query.limit < len(messages))


def completion_object(completion: StoredCompletion) -> StoredCompletionObject:
    """Return OpenAI's object of a stored completion."""
    request, answer = read_request(completion), read_answer(completion)
    return {
        "id": completion.pk,
        "object": "chat.completion",
        "created": int(completion.created_at.timestamp()),
        "model": completion.model_name,
        "request_id": completion.request_id,
        "choices": answer["choices"],
        "usage": answer["usage"],
        "metadata": completion.metadata,
        "seed": request.get("seed"),
        "temperature": request.get("temperature"),
        "top_p": request.get("top_p"),
        "presence_penalty": request.get("presence_penalty"),
        "frequency_penalty": request.get("frequency_penalty"),
        "tools": request.get("tools"),
        "tool_choice": request.get("tool_choice"),
        "response_format": request.get("response_format"),
        "input_user": user if isinstance(user := request.get("user"), str) else None,
        "service_tier": None,
        "system_fingerprint": None,
    }


def _message_object(id: str, message: dict[str, Any]) -> StoredMessageObject:
    content = message.get("content")
    parts = None
    if isinstance(content, list):
        parts = [{name: value for name, value in part.items() if value is not None} for part in content]
    text = "\n".join(part["text"] for part in parts if "text" in part) if parts is not None else content
    return {
        "id": id,
        "role": message["role"],
        "content": text,
        "content_parts": parts,
        "name": message.get("name"),
        "tool_calls": message.get("tool_calls"),
        "tool_call_id": message.get("tool_call_id"),
        "refusal": None,
    }
