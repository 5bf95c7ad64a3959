"""OpenAI's evals with the official SDK: runs ask models through the gateway, in batches of their own."""

import json
from collections.abc import Callable
from urllib.parse import urlsplit

import openai
import pytest
from django.urls import reverse
from openai.types.evals import RunRetrieveResponse

from apps.accounts.login.key_operations import revoke_key
from apps.accounts.models import OrganizationEvent
from apps.batches import worker
from apps.batches.models import Batch, BatchFile
from apps.billing.models import UsageConflict
from apps.core.database.clock import db_now
from apps.core.messages.outbox import deliver_due
from apps.datasets.validation.leases import validate_version
from apps.finetuning.usage.storage import stored_bytes
from apps.serving.evals import operations
from apps.serving.evals.models import Eval, EvalItem, EvalRun
from tests.factories.datasets import make_ready_version, make_version
from tests.factories.serving import BASE_MODEL, make_tenant
from tests.support.gateway.processes import usage_of, wait_until
from tests.support.sdk import extended_client
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db
EXACT = {
    "type": "string_check", "name": "exact", "input": "{{sample.output_text}}", "reference": "{{item.answer}}",
    "operation": "eq",
}  # fmt: skip
CLOSE = {
    "type": "text_similarity", "name": "close", "input": "{{ sample.output_text }}", "reference": "{{item.answer}}",
    "evaluation_metric": "rouge_l", "pass_threshold": 0.5,
}  # fmt: skip
CUSTOM = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
ASKED = {"type": "template", "template": [{"role": "user", "content": "{{item.question}}"}]}
ITEMS = [
    {"item": {"question": "greet", "answer": "Hello there."}},
    {"item": {"question": "part", "answer": "Bye."}},
    {"item": {"answer": "no question"}},
]
OFFLINE = {"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {"a": "x"}}]}}


def inline(items: list[dict], **fields: object) -> dict:
    source = {"type": "file_content", "content": items}
    return {"type": "completions", "model": BASE_MODEL, "input_messages": ASKED, "source": source} | fields


def grading(kind: str, text: str, **fields: object) -> dict:
    asked = [{"role": "system", "content": "Grade."}, {"role": "user", "content": text}]
    return {"type": kind, "name": kind, "model": BASE_MODEL, "input": asked} | fields


def begin(sdk: openai.OpenAI, criteria: list[dict], source: dict, **fields: object) -> RunRetrieveResponse:
    made = sdk.evals.create(name="sums", data_source_config=CUSTOM, testing_criteria=criteria)
    return sdk.evals.runs.create(made.id, data_source=source, name="nightly", **fields)


def end(sdk: openai.OpenAI, run: RunRetrieveResponse) -> RunRetrieveResponse:
    """Let the outbox and the worker of batches work until the run has ended."""

    def work() -> RunRetrieveResponse | None:
        deliver_due(lane="data-small")
        worker.work(seconds=10)
        deliver_due(lane="data-small")
        found = sdk.evals.runs.retrieve(run.id, eval_id=run.eval_id)
        return found if found.status not in ("queued", "in_progress") else None

    return wait_until(work, "the run has not ended", seconds=60)


def items_of(sdk: openai.OpenAI, run: RunRetrieveResponse, **query: object) -> list:
    return list(sdk.evals.runs.output_items.list(run.id, eval_id=run.eval_id, **query))


@pytest.mark.slow
def test_a_run_asks_grades_counts_and_is_charged_like_any_request(tenant, engine):
    sdk = extended_client(tenant.key)
    run = begin(sdk, [EXACT, CLOSE], inline(ITEMS, sampling_params={"max_completion_tokens": 16}), metadata={"a": "b"})
    assert (run.status, run.model, run.metadata, run.error) == ("queued", BASE_MODEL, {"a": "b"}, None)

    done = end(sdk, run)

    counts = done.result_counts
    assert (done.status, counts.total, counts.passed, counts.failed, counts.errored) == ("completed", 3, 1, 1, 1)
    assert [(each.testing_criteria, each.passed, each.failed) for each in done.per_testing_criteria_results] == [
        ("exact", 1, 1),
        ("close", 1, 1),
    ]
    (usage,) = done.per_model_usage
    assert (usage.run_model_name, usage.invocation_count, usage.prompt_tokens) == (BASE_MODEL, 2, 22)
    assert float(done.highest_cost_usd) > 0
    first, second, third = items_of(sdk, done)
    assert (first.status, first.datasource_item, first.sample.output[0].content) == (
        "pass",
        ITEMS[0]["item"],
        "Hello there.",
    )
    assert [(each.name, each.score, each.passed) for each in first.results] == [("exact", 1, True), ("close", 1, True)]
    assert [message.content for message in first.sample.input] == ["greet"]
    assert (first.sample.usage.total_tokens, first.sample.finish_reason) == (14, "stop")
    assert (second.status, third.status, third.results) == ("fail", "error", [])
    assert "item.question" in third.sample.error.message
    assert [each.id for each in items_of(sdk, done, status="fail")] == [second.id]
    assert [each.id for each in items_of(sdk, done, limit=1, order="desc")] == [third.id, second.id, first.id]
    one = sdk.evals.runs.output_items.retrieve(first.id, eval_id=run.eval_id, run_id=run.id)
    assert one.datasource_item_id == 0
    wait_until(lambda: len(usage_of(tenant)) == 2, "not charged once for each answer")
    assert all(event.key_id == tenant.key.key.pk and event.pk.startswith("useb_") for event in usage_of(tenant))
    assert not UsageConflict.objects.filter(organization=tenant.organization).exists()
    (event,) = OrganizationEvent.objects.filter(organization=tenant.organization, subject=run.id)
    assert (event.type, event.path) == ("eval.run.succeeded", f"/evals/{run.eval_id}/runs/{run.id}")
    assert list(sdk.batches.list()) == [] and not [file for file in sdk.files.list() if "eval" in file.purpose]
    assert not BatchFile.objects.filter(organization=tenant.organization, deleted_at=None).exists()


@pytest.mark.slow
def test_models_grade_by_label_by_score_and_in_pairs(tenant, engine):
    engine.scripts["hail"] = Script(tokens=("Hi", "!"))
    engine.scripts["label Hi!"] = Script(tokens=('"good"',))
    engine.scripts["score Hi!"] = Script(tokens=("0.7",))
    engine.scripts["bad score Hi!"] = Script(tokens=("7",))
    pair = {"request": [{"role": "user", "content": "hail"}], "first": "Hi!", "second": "Hi!"}
    engine.scripts[json.dumps(pair, separators=(",", ":"))] = Script(tokens=('"tie"',))
    criteria = [
        grading("label_model", "label {{sample.output_text}}", labels=["good", "bad"], passing_labels=["good"]),
        grading("score_model", "score {{sample.output_text}}", pass_threshold=0.6),
        {"type": "pairwise_model", "name": "pair", "model": BASE_MODEL, "baseline_model": tenant.model_name},
    ]
    sdk = extended_client(tenant.key)

    done = end(sdk, begin(sdk, criteria, inline([{"item": {"question": "hail"}}])))

    (item,) = items_of(sdk, done)
    assert [(each.type, each.score, each.passed) for each in item.results] == [
        ("label_model", 1, True),
        ("score_model", 0.7, True),
        ("pairwise_model", 0.5, True),
    ]
    assert (done.result_counts.passed, sorted(each.run_model_name for each in done.per_model_usage)) == (
        1,
        sorted([BASE_MODEL, tenant.model_name]),
    )
    unreadable = grading("score_model", "bad score {{sample.output_text}}")
    failed = end(sdk, begin(sdk, [unreadable], inline([{"item": {"question": "hail"}}])))
    (item,) = items_of(sdk, failed)
    assert (failed.result_counts.errored, item.results[0].score, item.results[0].passed) == (1, 0, False)
    assert "no number from 0 to 1" in item.results[0].error


@pytest.mark.slow
def test_files_datasets_and_stored_completions_are_sources(gateway, tenant, engine):
    sdk = extended_client(tenant.key)
    lines = "\n".join(json.dumps(each | {"sample": {"output_text": "Bye."}}) for each in ITEMS[:2])
    file = sdk.files.create(file=("items.jsonl", lines.encode()), purpose="evals")
    row = {"messages": [{"role": "user", "content": "greet"}, {"role": "assistant", "content": "Hello there."}]}
    rows = "\n".join([json.dumps(row)] * 10)
    dataset = sdk.files.create(file=("rows.jsonl", rows.encode()), purpose="fine-tune")
    for text in ("greet", "other"):
        gateway.openai(tenant.key).chat.completions.create(
            model=BASE_MODEL, messages=[{"role": "user", "content": text}], store=True, metadata={"text": text}
        )
    wait_until(lambda: len(list(sdk.chat.completions.list())) == 2, "not stored")
    reference = EXACT | {"reference": "{{item.reference}}"}
    given = EXACT | {"reference": "Hello there."}
    whole = {"type": "item_reference", "item_reference": "item.input"}
    wanted = {"type": "stored_completions", "metadata": {"text": "greet"}}

    assert (file.status, file.purpose) == ("processed", "evals")
    of_file = end(sdk, begin(sdk, [EXACT], {"type": "jsonl", "source": {"type": "file_id", "id": file.id}}))
    assert (of_file.result_counts.passed, of_file.result_counts.failed, of_file.model) == (1, 1, "")
    assert [message.sample.output[0].content for message in items_of(sdk, of_file)] == ["Bye."] * 2
    source = inline([], source={"type": "file_id", "id": dataset.id}, input_messages=whole)
    assert end(sdk, begin(sdk, [reference], source)).result_counts.passed == 10
    stored = end(sdk, begin(sdk, [given], {"type": "completions", "source": wanted}))
    assert (stored.result_counts.total, stored.result_counts.passed, stored.per_model_usage) == (1, 1, [])
    again = end(sdk, begin(sdk, [given], {"type": "completions", "source": wanted, "model": tenant.model_name}))
    assert (again.result_counts.passed, again.per_model_usage[0].run_model_name) == (1, tenant.model_name)
    logs = sdk.evals.create(
        data_source_config={"type": "logs", "metadata": {"text": "other"}}, testing_criteria=[given]
    )
    of_logs = sdk.evals.runs.create(
        logs.id, data_source={"type": "completions", "source": {"type": "stored_completions"}}
    )
    assert end(sdk, of_logs).result_counts.total == 1


@pytest.mark.slow
def test_a_run_is_bounded_canceled_and_deleted_with_its_results(tenant, world, monkeypatch):
    sdk = extended_client(tenant.key)
    poor = make_tenant("Poor", world.base_model, credit_nano=1)
    dear = end(sdk, begin(sdk, [EXACT], inline(ITEMS), extra_body={"max_cost_usd": "0.000001"}))
    broke = end(extended_client(poor.key), begin(extended_client(poor.key), [EXACT], inline(ITEMS)))
    assert (dear.status, dear.error.code, broke.status) == ("failed", "insufficient_quota", "failed")
    assert OrganizationEvent.objects.get(subject=dear.id).type == "eval.run.failed"
    assert "max_cost_usd" in dear.error.message and "is available" in broke.error.message
    assert usage_of(tenant) == usage_of(poor) == []

    before = stored_bytes(organizations=[tenant.organization.pk])[tenant.organization.pk]
    run = begin(sdk, [EXACT], inline(ITEMS))
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        sdk.evals.runs.delete(run.id, eval_id=run.eval_id)
    with pytest.raises(openai.BadRequestError, match="in progress"):
        sdk.evals.delete(run.eval_id)
    deliver_due(lane="data-small")
    assert sdk.evals.runs.retrieve(run.id, eval_id=run.eval_id).status == "in_progress"
    assert stored_bytes(organizations=[tenant.organization.pk])[tenant.organization.pk] > before
    monkeypatch.setattr(operations, "MAX_ACTIVE", 1)
    with pytest.raises(openai.RateLimitError, match="in progress"):
        sdk.evals.runs.create(run.eval_id, data_source=inline(ITEMS))
    canceled = sdk.evals.runs.cancel(run.id, eval_id=run.eval_id)
    assert canceled.status == sdk.evals.runs.cancel(run.id, eval_id=run.eval_id).status == "canceled"
    assert OrganizationEvent.objects.get(subject=run.id).type == "eval.run.canceled"
    worker.work(seconds=10)
    deliver_due(lane="data-small")
    assert Batch.objects.get(eval_run=run.id).status == "cancelled"
    assert (items_of(sdk, run), usage_of(tenant)) == ([], [])
    deleted = sdk.evals.runs.delete(run.id, eval_id=run.eval_id)
    assert (deleted.run_id, deleted.deleted) == (run.id, True)
    with pytest.raises(openai.NotFoundError):
        sdk.evals.runs.retrieve(run.id, eval_id=run.eval_id)
    assert not EvalItem.objects.filter(run=run.id).exists()
    assert sdk.evals.delete(run.eval_id).deleted
    assert stored_bytes(organizations=[tenant.organization.pk])[tenant.organization.pk] == before


@pytest.mark.slow
def test_a_run_whose_key_is_revoked_keeps_what_it_has_and_says_why(tenant, engine):
    sdk = extended_client(tenant.key)
    run = begin(sdk, [EXACT], inline(ITEMS[:2]))
    deliver_due(lane="data-small")
    revoke_key(organization=tenant.organization, key_id=tenant.key.key.pk, by=tenant.owner, now=db_now())
    worker.work(seconds=10)
    deliver_due(lane="data-small")

    ended = EvalRun.objects.get(pk=run.id)

    assert (ended.status, ended.error["code"], ended.errored) == ("failed", "invalid_api_key", 2)


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"type": "python", "name": "p", "source": "x"}, "testing_criteria[0].type", "not_offered"),
        (CLOSE | {"evaluation_metric": "cosine"}, "testing_criteria[0].evaluation_metric", "not_offered"),
        (CLOSE | {"pass_threshold": None}, "testing_criteria[0].pass_threshold", "invalid_value"),
        (
            grading("label_model", "x", labels=["a"], passing_labels=["b"]),
            "testing_criteria[0].passing_labels",
            "invalid_value",
        ),
        (grading("score_model", "x", range=[1, 0]), "testing_criteria[0].range", "invalid_value"),
        (grading("score_model", "x", model="nothing"), "testing_criteria[0].model", "invalid_value"),
        (EXACT | {"operation": "is"}, "testing_criteria[0].operation", "invalid_value"),
    ],
)
def test_a_criterion_that_cannot_be_used_is_named(tenant, change, param, code):
    with pytest.raises(openai.BadRequestError) as refused:
        extended_client(tenant.key).evals.create(data_source_config=CUSTOM, testing_criteria=[change])

    assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.slow
def test_a_source_that_cannot_be_used_is_named_and_evals_can_be_changed_and_listed(tenant, world):
    sdk, rival = extended_client(tenant.key), extended_client(world.rival.key)
    made = sdk.evals.create(name="one", data_source_config=CUSTOM, testing_criteria=[EXACT], metadata={"a": "b"})
    other = sdk.evals.create(data_source_config={"type": "stored_completions"}, testing_criteria=[CLOSE])
    foreign = rival.files.create(file=("items.jsonl", b'{"item": {}}'), purpose="evals")
    for source, status, param in (
        ({"type": "responses", "source": {"type": "responses"}}, 400, "data_source.type"),
        (inline(ITEMS, model="nothing"), 400, "data_source.model"),
        (inline(ITEMS, model=world.rival.model_name), 400, "data_source.model"),
        (inline(ITEMS, input_messages=None), 400, "data_source.input_messages"),
        ({"type": "jsonl", "source": {"type": "file_id", "id": foreign.id}}, 404, "data_source.source.id"),
        (inline([{"item": {"a": "x" * 200_000}}]), 400, "data_source.source.content"),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            sdk.evals.runs.create(made.id, data_source=source)
        assert (refused.value.status_code, refused.value.param) == (status, param)

    assert made.data_source_config.schema_["required"] == ["item", "sample"]
    stored = Eval.objects.get(pk=made.id).bytes
    changed = sdk.evals.update(made.id, name="two", metadata={"c": "d" * 51})
    assert (changed.name, changed.metadata, sdk.evals.retrieve(made.id).name) == ("two", {"c": "d" * 51}, "two")
    assert Eval.objects.get(pk=made.id).bytes == stored + 50  # of the organization's storage
    assert sdk.evals.update(made.id, name="two").metadata == {"c": "d" * 51}
    assert sdk.evals.update(made.id, metadata=None).metadata == {}
    assert [each.id for each in sdk.evals.list(limit=1)] == [made.id, other.id]
    assert [each.id for each in sdk.evals.list(order="desc", order_by="updated_at")] == [made.id, other.id]
    assert list(rival.evals.list()) == []
    calls: tuple[Callable[..., object], ...] = (rival.evals.retrieve, rival.evals.delete, rival.evals.runs.list)
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    offline = sdk.evals.runs.create(made.id, data_source=OFFLINE)
    assert [each.id for each in sdk.evals.runs.list(made.id, status="queued")] == [offline.id]
    assert list(sdk.evals.runs.list(made.id, status="failed")) == []
    assert urlsplit(offline.report_url).path == reverse("web:eval_run", args=[made.id, offline.id])


def test_a_run_waits_until_its_file_is_validated(tenant):
    made = make_version(tenant.organization, purpose="evals")
    source = {"type": "jsonl", "source": {"type": "file_id", "id": made.pk}}
    sdk = extended_client(tenant.key)

    with pytest.raises(openai.InternalServerError) as early:
        begin(sdk, [EXACT], source)
    validate_version(version_id=made.pk, now=db_now())
    broken = make_ready_version(tenant.organization, b'{"messages": 1}\n' * 9, purpose="evals")
    with pytest.raises(openai.BadRequestError) as refused:
        begin(sdk, [EXACT], source | {"source": {"type": "file_id", "id": broken.pk}})

    assert (early.value.code, early.value.response.headers["Retry-After"]) == ("file_still_validating", "2")
    assert (refused.value.code, refused.value.param) == ("file_not_ready", "data_source.source.id")
    assert begin(sdk, [EXACT], source).status == "queued"
