"""The data of a run: the source of its items, and the question to a model about each."""

import datetime
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from apps.accounts.members.visibility import Sight, seeing
from apps.accounts.models import Organization
from apps.batches.completions.queries import list_completions, read_answer, read_request
from apps.batches.queries import find_file
from apps.contracts.chat import split_lines
from apps.contracts.evaluation.graders import TextTooLong, UnknownVariable, names_of, value_at
from apps.contracts.struct import is_deeper
from apps.core.errors import InvalidValue
from apps.core.objects.store import read_chunks, store
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion
from apps.datasets.operations import RETRY_SECONDS, NotReady, StillValidating
from apps.datasets.queries import get_version
from apps.serving.evals.criteria import Messages, check_messages, fill_messages

MAX_ITEMS = 1_000
MAX_ITEM_BYTES = 256 * 1024
MAX_SOURCE_BYTES = 16 * 1024 * 1024
MAX_FILE_BYTES, MAX_LINES = 2 * MAX_SOURCE_BYTES, 10 * MAX_ITEMS  # read of a file, blank lines included
MAX_INLINE_BYTES = 128 * 1024  # of items that come with the request, which the run repeats
DEFAULT_ANSWER_TOKENS, MAX_ANSWER_TOKENS = 1_024, 4_096
_MAX_DEPTH = 64
_FILE = "data_source.source.id"
_READ_AT_ONCE = 4  # each may have 8 MiB


class InlineItem(msgspec.Struct, forbid_unknown_fields=True):
    item: dict[str, Any]
    sample: dict[str, Any] | None = None


class InlineItems(msgspec.Struct, tag_field="type", tag="file_content", forbid_unknown_fields=True):
    content: Annotated[list[InlineItem], Meta(min_length=1, max_length=MAX_ITEMS)]


class FileId(msgspec.Struct, tag_field="type", tag="file_id", forbid_unknown_fields=True):
    """A file of items, one JSON object in each line: `{"item": {…}, "sample": {…}}`, or a row of a dataset."""

    id: str


class StoredCompletions(msgspec.Struct, tag_field="type", tag="stored_completions", forbid_unknown_fields=True):
    created_after: int | None = None
    created_before: int | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS)] | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None


class InputTemplate(msgspec.Struct, tag_field="type", tag="template", forbid_unknown_fields=True):
    template: Messages


class ItemReference(msgspec.Struct, tag_field="type", tag="item_reference", forbid_unknown_fields=True):
    """The place of an item's messages, such as `item.input`."""

    item_reference: Annotated[str, Meta(pattern=r"^item\.[^\s{}]{1,200}$")]


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_ANSWER_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning_effort: Annotated[str | None, Meta(description="Without effect.")] = None


class JsonlSource(msgspec.Struct, tag_field="type", tag="jsonl", forbid_unknown_fields=True):
    """Items whose answers are already in the data, or that are graded without an answer."""

    source: InlineItems | FileId


class CompletionsSource(msgspec.Struct, tag_field="type", tag="completions", forbid_unknown_fields=True):
    """Items that `model` answers. Without a model, the answers of stored completions are graded."""

    source: InlineItems | FileId | StoredCompletions
    input_messages: InputTemplate | ItemReference | None = None
    model: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    sampling_params: SamplingParams | None = None


class ResponsesSource(msgspec.Struct, tag_field="type", tag="responses"):
    """Stored responses. This source is not offered."""


DataSource = JsonlSource | CompletionsSource | ResponsesSource


class SourceItem(msgspec.Struct, frozen=True):
    """One item. `sample` is the answer that came with it, if any."""

    item: dict[str, Any]
    sample: dict[str, Any] | None = None


def check_source(source: DataSource, *, organization: Organization | str) -> None:
    """Raise InvalidValue, UnknownFile, NotReady or StillValidating if no run can read the data source."""
    if isinstance(source, ResponsesSource):
        text = "Anneal stores no responses, so 'responses' is not offered: use 'completions'."
        raise InvalidValue(text, param="data_source.type", code="not_offered")
    match source.source:
        case InlineItems() as inline if len(msgspec.json.encode(inline)) > MAX_INLINE_BYTES:
            text = f"Items sent with a run have at most {MAX_INLINE_BYTES // 1024} KiB together: upload a file."
            raise InvalidValue(text, param="data_source.source.content")
        case FileId(id=file_id) if not find_file(organization=organization, id=file_id):
            _require_ready(get_version(organization=organization, id=file_id, param=_FILE))
    if isinstance(source, CompletionsSource) and isinstance(source.input_messages, InputTemplate):
        check_messages(source.input_messages.template, param="data_source.input_messages.template")
    if isinstance(source, JsonlSource) or source.model is None:
        return
    if source.input_messages is None and not isinstance(source.source, StoredCompletions):
        text = "Give the messages that the model is asked, as a template or as an item_reference."
        raise InvalidValue(text, param="data_source.input_messages")


def _require_ready(version: DatasetVersion) -> None:
    if version.status == DatasetVersionStatus.INVALID:
        raise NotReady("The file has errors, so no run reads it. Fix them and upload it again.", param=_FILE)
    if version.status != DatasetVersionStatus.READY:
        text = f"The file is still being validated: send the request again in {RETRY_SECONDS} seconds."
        raise StillValidating(text, param=_FILE, retry_after_seconds=RETRY_SECONDS)


def read_items(
    source: DataSource, *, organization: Organization | str, project_id: str, metadata: Mapping[str, str]
) -> list[SourceItem]:
    """Return the items of a run, in order. `metadata` selects the stored completions, as the eval defines it.

    Of private projects, only completions of the run's own are read, because all who see the run see its items. Raises
    InvalidValue for data that cannot be used, UnknownFile.
    """
    assert not isinstance(source, ResponsesSource)
    found: Iterable[SourceItem]
    match source.source:
        case InlineItems(content=content):
            found = [SourceItem(one.item, one.sample) for one in content]
        case FileId(id=file_id):
            found = _of_file(file_id, organization)
        case StoredCompletions() as wanted:
            found = _of_completions(wanted, organization, project_id, metadata)
    items: list[SourceItem] = []
    size = 0
    for item in found:
        size += len(msgspec.json.encode(item))
        if len(items) >= MAX_ITEMS or size > MAX_SOURCE_BYTES:
            raise _too_many()
        items.append(item)
    if not items:
        raise InvalidValue("The data source has no items.", param="data_source.source")
    return items


def _of_file(file_id: str, organization: Organization | str) -> Iterator[SourceItem]:
    file = find_file(organization=organization, id=file_id)
    if file is not None:
        key = file.object_key
    else:
        key = get_version(organization=organization, id=file_id, param=_FILE).data_key
    with store().open_stream(key) as stream:
        for line in split_lines(_bounded(read_chunks(stream)), max_line_bytes=MAX_ITEM_BYTES):
            if not (text := line.data.removeprefix(BOM_UTF8).strip()) and not line.is_too_long:
                continue
            try:
                row = msgspec.json.decode(text, type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                problem = f"Line {line.number} is no JSON object of at most {MAX_ITEM_BYTES // 1024} KiB."
                raise InvalidValue(problem, param=_FILE) from error
            if is_deeper(row, _MAX_DEPTH):  # what it becomes part of could not be written
                problem = f"Line {line.number} is nested deeper than {_MAX_DEPTH} levels. Flatten it."
                raise InvalidValue(problem, param=_FILE)
            yield _item_of(row, line.number)


def _bounded(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the chunks of a file. Raises InvalidValue if it is mostly blank and so takes long to read."""
    size = lines = 0
    for chunk in chunks:
        size, lines = size + len(chunk), lines + chunk.count(b"\n")
        if size > MAX_FILE_BYTES or lines > MAX_LINES:
            raise _too_many()
        yield chunk


def _too_many() -> InvalidValue:
    text = f"A run has at most {MAX_ITEMS:,} items, and {MAX_SOURCE_BYTES // 1024**2} MiB of them."
    return InvalidValue(text, param="data_source.source")


def _item_of(row: dict[str, Any], number: int) -> SourceItem:
    """Return the item of a line. A row of a dataset gets its prompt as `input` and its answer as `reference`."""
    if "item" in row:
        item, sample = row["item"], row.get("sample")
        if not isinstance(item, dict) or not isinstance(sample, dict | None):
            text = f"Line {number}: item and sample must be objects."
            raise InvalidValue(text, param=_FILE)
        return SourceItem(item, sample)
    messages = row.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        last = messages[-1]
        if last.get("role") == "assistant":
            return SourceItem(row | {"input": messages[:-1], "reference": last.get("content")})
        return SourceItem(row | {"input": messages})
    return SourceItem(row)


def _of_completions(
    wanted: StoredCompletions, organization: Organization | str, project_id: str, metadata: Mapping[str, str]
) -> Iterator[SourceItem]:
    with seeing(Sight(project_ids=frozenset({project_id}))):
        found = list_completions(
            organization=organization, model_name=wanted.model, metadata={**metadata, **(wanted.metadata or {})}
        )
    for name, seconds in (("gt", wanted.created_after), ("lt", wanted.created_before)):
        if seconds is not None:
            try:
                moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
            except (ValueError, OverflowError, OSError) as error:
                raise InvalidValue("A time is in seconds since 1970.", param="data_source.source") from error
            found = found.filter(**{f"created_at__{name}": moment})
    for completion in found[: wanted.limit or MAX_ITEMS].iterator(_READ_AT_ONCE):
        choices = read_answer(completion)["choices"]
        text = (choices[0]["message"].get("content") or "") if choices else ""
        item = {
            "id": completion.pk,
            "model": completion.model_name,
            "input": read_request(completion)["messages"],
            "metadata": completion.metadata,
        }
        yield SourceItem(item, {"output_text": text})


# --- What a model is asked --------------------------------------------------------------------------------------------


def names_with(item: SourceItem, answer: str | None) -> dict[str, Any]:
    """Return the values that templates may name. `answer` is the model's; without it, the item's own sample is used."""
    given = item.sample or {}
    if answer is None and not isinstance(given.get("output_text"), str):
        return {"item": item.item, "sample": given}
    names = names_of(answer if answer is not None else given["output_text"], item.item)
    return names | {"sample": given | names["sample"]}


def question_of(source: CompletionsSource, item: SourceItem) -> list[dict[str, Any]]:
    """Return the messages that a model is asked about an item. Raises UnknownVariable, TextTooLong, InvalidValue."""
    match source.input_messages:
        case InputTemplate(template=template):
            return list(fill_messages(template, {"item": item.item}))
        case ItemReference(item_reference=place):
            messages = value_at({"item": item.item}, place)
        case None:
            messages = item.item.get("input")
    if not isinstance(messages, list) or not messages:
        raise UnknownVariable("list of messages there")
    return messages


def question_of_item(source: DataSource, item: SourceItem) -> list[dict[str, Any]]:
    """Return the messages that a model was sent about an item; none if they could not be made."""
    try:
        return question_of(source, item) if isinstance(source, CompletionsSource) else []
    except (UnknownVariable, TextTooLong):
        return []


def sampling_request(
    source: CompletionsSource, model: str, messages: list[dict[str, Any]], *, context_length: int
) -> dict[str, object]:
    """Return the body of the request to a model.

    If the run sets no limit, half of the context is left for the prompt.
    """
    params = source.sampling_params or SamplingParams()
    fields: dict[str, object] = msgspec.to_builtins(params)
    fields.pop("reasoning_effort", None)
    tokens = min(DEFAULT_ANSWER_TOKENS, context_length // 2)
    return {"max_completion_tokens": tokens} | fields | {"model": model, "messages": messages}
