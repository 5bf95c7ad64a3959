"""/v1/evals: OpenAI's evals, their runs, and the output items of runs."""

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.interfaces.api.openai.eval_objects import (
    DeletedEval,
    DeletedRun,
    EvalObject,
    EvalRunObject,
    ItemRenderer,
    OutputItemObject,
    eval_object,
    run_object,
)
from apps.interfaces.api.openai.graders import EXAMPLE
from apps.interfaces.api.requests.amounts import read_nano
from apps.interfaces.api.requests.idempotency import is_client_retry
from apps.interfaces.api.requests.pagination import PAGE_BYTES, ListObject, PageQuery, SearchQuery, page, with_words_of
from apps.interfaces.api.views import ApiView
from apps.serving.evals import operations, queries
from apps.serving.evals.criteria import SentCriteria
from apps.serving.evals.lifecycle import EvalRunStatus, ItemStatus
from apps.serving.evals.models import Eval
from apps.serving.evals.sources import DataSource

_MAX_SCHEMA_BYTES = 16 * 1024
_Name = Annotated[str, Meta(max_length=200)]
_Order = Literal["asc", "desc"]
_SOURCE = {
    "type": "completions",
    "model": "anneal-demo",
    "input_messages": {"type": "template", "template": [{"role": "user", "content": "{{item.question}}"}]},
    "source": {"type": "file_content", "content": [{"item": {"question": "2 + 2?", "answer": "4"}}]},
}


class CustomConfig(msgspec.Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    """Items of your own. The schema is kept for readers; an item that lacks what a template names is an error."""

    item_schema: dict[str, Any]
    include_sample_schema: bool = False


class LogsConfig(msgspec.Struct, tag_field="type", tag="logs", forbid_unknown_fields=True):
    """Stored completions with these pairs of metadata."""

    metadata: dict[str, str] | None = None


class StoredCompletionsConfig(msgspec.Struct, tag_field="type", tag="stored_completions", forbid_unknown_fields=True):
    """OpenAI's older name of `logs`."""

    metadata: dict[str, str] | None = None


class CreateEval(msgspec.Struct, forbid_unknown_fields=True):
    data_source_config: CustomConfig | LogsConfig | StoredCompletionsConfig
    testing_criteria: SentCriteria
    name: _Name = ""
    metadata: dict[str, str] | None = None


class UpdateEval(msgspec.Struct, forbid_unknown_fields=True):
    """What is left out stays as it is; null removes the metadata."""

    name: _Name | None = None
    metadata: dict[str, str] | UnsetType | None = UNSET


class CreateRun(msgspec.Struct, forbid_unknown_fields=True):
    """`max_cost_usd` is Anneal's: the run fails before it asks anything if it can cost more."""

    data_source: DataSource
    name: _Name = ""
    metadata: dict[str, str] | None = None
    max_cost_usd: str | int | float | None = None


class EvalsQuery(SearchQuery):
    order: _Order = "asc"
    order_by: Literal["created_at", "updated_at"] = "created_at"


class RunsQuery(PageQuery):
    order: _Order = "asc"
    status: EvalRunStatus | None = None


class ItemsQuery(PageQuery):
    order: _Order = "asc"
    status: Literal["pass", "fail", "error"] | None = None


class _EvalView(ApiView):
    def _eval(self, eval_id: str) -> Eval:
        return queries.get_eval(organization=self.organization, id=eval_id)


class EvalList(_EvalView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.INFERENCE}
    examples = {
        "POST": {
            "name": "sums",
            "data_source_config": {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True},
            "testing_criteria": [EXAMPLE],
        }
    }

    def get(self, request: Request, query: EvalsQuery) -> ListObject[EvalObject]:
        """List evals, oldest first unless `order` is `desc`. `q` is Anneal's: it searches names and ids."""
        sign = "-" if query.order == "desc" else ""
        evals = queries.list_evals(organization=self.organization)
        found = with_words_of(query, evals, fields=("name", "id"))
        order = (f"{sign}{query.order_by}", f"{sign}id")
        return page(query, found, eval_object, order=order, most_bytes=PAGE_BYTES, places=evals)

    def post(self, request: Request, body: CreateEval) -> EvalObject:
        """Create an eval: what answers are graded by."""
        config = cast(dict[str, Any], msgspec.to_builtins(body.data_source_config))
        if len(msgspec.json.encode(config)) > _MAX_SCHEMA_BYTES:
            text = f"The configuration has more than {_MAX_SCHEMA_BYTES // 1024} KiB: give a smaller schema."
            raise InvalidValue(text, param="data_source_config")
        created = operations.create_eval(
            organization=self.organization,
            name=body.name or "Untitled eval",
            data_source_config=config,
            criteria=body.testing_criteria,
            metadata=body.metadata or {},
            by=self.actor,
        )
        return eval_object(created)


class EvalDetail(_EvalView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.INFERENCE, "DELETE": Permission.INFERENCE}
    examples = {"POST": {"name": "sums, renamed"}}

    def get(self, request: Request, eval_id: str) -> EvalObject:
        """Return an eval."""
        return eval_object(self._eval(eval_id))

    def post(self, request: Request, eval_id: str, body: UpdateEval) -> EvalObject:
        """Rename an eval, or replace its metadata."""
        evaluated = self._eval(eval_id)
        metadata = None if body.metadata is UNSET else body.metadata or {}
        updated = operations.update_eval(
            evaluated=evaluated, name=body.name or None, metadata=metadata, by=self.actor, now=db_now()
        )
        return eval_object(updated)

    def delete(self, request: Request, eval_id: str) -> DeletedEval:
        """Delete an eval with its runs."""
        operations.delete_eval(evaluated=self._eval(eval_id), by=self.actor)
        return {"eval_id": eval_id, "object": "eval.deleted", "deleted": True}


class EvalRunList(_EvalView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.INFERENCE}
    examples = {"POST": {"name": "nightly", "data_source": _SOURCE, "max_cost_usd": "0.50"}}

    def get(self, request: Request, eval_id: str, query: RunsQuery) -> ListObject[EvalRunObject]:
        """List the runs of an eval, oldest first unless `order` is `desc`."""
        runs = queries.list_runs(evaluated=self._eval(eval_id))
        found = runs.filter(status=query.status) if query.status else runs
        sign = "-" if query.order == "desc" else ""
        order = (f"{sign}created_at", f"{sign}id")
        return page(query, found, run_object, order=order, most_bytes=PAGE_BYTES, places=runs)

    def post(self, request: Request, eval_id: str, body: CreateRun) -> EvalRunObject:
        """Create a run: ask a model about each item, and grade its answers. It runs in the background."""
        evaluated = self._eval(eval_id)
        sent = cast(dict[str, Any], cast(dict[str, object], request.data)["data_source"])
        run = operations.create_run(
            evaluated=evaluated,
            name=body.name or evaluated.name,
            data_source=sent,
            source=body.data_source,
            metadata=body.metadata or {},
            cost_limit_nano=_cost_limit_nano(body),
            by=self.actor,
            is_retry=is_client_retry(request),
        )
        return run_object(run)


def _cost_limit_nano(body: CreateRun) -> int | None:
    if body.max_cost_usd is None:
        return None
    nano = read_nano("max_cost_usd", body.max_cost_usd)
    if nano < 0:
        raise InvalidValue("'max_cost_usd' must be 0 or more dollars, such as 2.50.", param="max_cost_usd")
    return nano


class EvalRunDetail(_EvalView):
    required_scope = {"GET": Permission.VIEW, "DELETE": Permission.INFERENCE}

    def get(self, request: Request, eval_id: str, run_id: str) -> EvalRunObject:
        """Return a run with its counts."""
        return run_object(queries.get_run(evaluated=self._eval(eval_id), id=run_id))

    def delete(self, request: Request, eval_id: str, run_id: str) -> DeletedRun:
        """Delete a run with its results."""
        operations.delete_run(run=queries.get_run(evaluated=self._eval(eval_id), id=run_id), by=self.actor)
        return {"run_id": run_id, "object": "eval.run.deleted", "deleted": True}


class EvalRunCancel(_EvalView):
    required_scope = {"POST": Permission.INFERENCE}

    def post(self, request: Request, eval_id: str, run_id: str) -> EvalRunObject:
        """Cancel a run. Requests in progress end, and no more are sent."""
        run = queries.get_run(evaluated=self._eval(eval_id), id=run_id)
        return run_object(operations.cancel_run(run=run, by=self.actor, now=db_now()))


class OutputItemList(_EvalView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, eval_id: str, run_id: str, query: ItemsQuery) -> ListObject[OutputItemObject]:
        """List the graded items of a run, in their order unless `order` is `desc`."""
        run = queries.get_run(evaluated=self._eval(eval_id), id=run_id)
        found = queries.list_items(run=run)
        found = found.filter(status=ItemStatus(query.status)) if query.status else found
        sign = "-" if query.order == "desc" else ""
        order = (f"{sign}number", f"{sign}id")
        return page(query, found, ItemRenderer(run).render, order=order, most_bytes=PAGE_BYTES)


class OutputItemDetail(_EvalView):
    required_scope = {"GET": Permission.VIEW}

    def get(self, request: Request, eval_id: str, run_id: str, output_item_id: str) -> OutputItemObject:
        """Return a graded item of a run."""
        run = queries.get_run(evaluated=self._eval(eval_id), id=run_id)
        return ItemRenderer(run).render(queries.get_item(run=run, id=output_item_id))
