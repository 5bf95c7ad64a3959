"""Runs of evals are bounded before they ask anything, and one that cannot go on ends with its reason."""

import msgspec
import pytest
from django.db import connection

from apps.accounts.members.projects import archive_project, create_project
from apps.accounts.models import Organization
from apps.batches import operations as batches
from apps.batches import worker
from apps.batches.files import create_file
from apps.batches.lifecycle import BatchStatus
from apps.batches.models import Batch, BatchFile
from apps.catalog.models import BaseModel
from apps.contracts.evaluation.graders import MAX_CHARACTERS, SimilarityGrader, StringCheckGrader, TextTooLong, fill
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue, NotFound, QuotaExceeded
from apps.core.objects.store import ObjectMissing
from apps.finetuning.usage.storage import stored_bytes
from apps.interfaces.api.openai.eval_objects import ItemRenderer
from apps.interfaces.api.requests.pagination import PageQuery, take
from apps.serving.evals import operations, plans, progress, quotes, results
from apps.serving.evals.costs import asked_by
from apps.serving.evals.criteria import (
    MAX_MESSAGES_CHARACTERS,
    LabelModelCriterion,
    ScoreModelCriterion,
    SentCriterion,
    TemplateMessage,
    check_criteria,
    fill_messages,
)
from apps.serving.evals.lifecycle import EvalRunStatus
from apps.serving.evals.models import Eval, EvalItem, EvalRun
from apps.serving.evals.queries import list_items
from apps.serving.evals.sources import (
    MAX_LINES,
    CompletionsSource,
    FileId,
    InlineItem,
    InlineItems,
    InputTemplate,
    ItemReference,
    JsonlSource,
    names_with,
)
from tests.factories.accounts import make_organization
from tests.factories.serving import BASE_MODEL, CONTEXT_LENGTH, Tenant, make_served_model, make_tenant

EXACT = StringCheckGrader(name="exact", input="{{sample.output_text}}", reference="x", operation="eq")
TWO_ITEMS = InlineItems(content=[InlineItem({"question": "one"}), InlineItem({"question": "two"})])
ASKED = InputTemplate(template=[TemplateMessage(role="user", content="{{item.question}}")])
OFFLINE = JsonlSource(source=TWO_ITEMS)
ASKING = CompletionsSource(source=TWO_ITEMS, model=BASE_MODEL, input_messages=ASKED)


@pytest.fixture
def tenant(db: None) -> Tenant:
    return make_tenant("Northline", make_served_model(BASE_MODEL, "unix:///nowhere"))


def labels(*texts: str) -> LabelModelCriterion:
    asked = [TemplateMessage(role="user", content=text) for text in texts]
    return LabelModelCriterion(name="label", model=BASE_MODEL, input=asked, labels=["a"], passing_labels=["a"])


def make_eval(organization: Organization, *criteria: SentCriterion) -> Eval:
    return operations.create_eval(
        organization=organization, name="sums", data_source_config={"type": "custom"}, criteria=criteria or [EXACT],
        metadata={}, by="user_1",
    )  # fmt: skip


def make_run(tenant: Tenant, source: CompletionsSource | JsonlSource, *criteria: SentCriterion) -> EvalRun:
    return operations.create_run(
        evaluated=make_eval(tenant.organization, *criteria), name="nightly", data_source=msgspec.to_builtins(source),
        source=source, metadata={}, cost_limit_nano=None, by="user_1",
    )  # fmt: skip


def ended(run: EvalRun, status: BatchStatus, **fields: object) -> Batch:
    """Let the run's batch end without the worker of batches."""
    run.refresh_from_db()
    path = (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.COMPLETED)
    for step in path[: path.index(status) + 1] if status in path else (status,):
        Batch.objects.filter(pk=run.batch_id).update(status=step, **fields)
    return Batch.objects.get(pk=run.batch_id)


def test_the_requests_of_a_run_are_limited_together_and_written_as_they_are_made(tenant, monkeypatch) -> None:
    run = make_run(tenant, ASKING)
    monkeypatch.setattr(quotes, "MAX_REQUEST_BYTES", 100)
    progress.prepare(run.pk)
    run.refresh_from_db()
    assert (run.status, run.error["code"], run.batch) == (EvalRunStatus.FAILED, "invalid_value", None)
    assert "fewer items" in run.error["message"]
    assert not run.items.exists()

    with pytest.raises(batches.BatchFileTooLarge, match="fewer items"):
        monkeypatch.setattr(batches, "MAX_FILE_BYTES", 10)
        batches.create_eval_batch(
            organization=tenant.organization.pk, project_id=run.evaluated.project_id, run_id=run.pk,
            lines=[b"x" * 11], by="user_1", now=db_now(),
        )  # fmt: skip
    assert not BatchFile.objects.exists()


def test_a_question_longer_than_the_context_of_its_model_is_an_error_of_its_item(tenant, monkeypatch) -> None:
    monkeypatch.setattr(plans, "largest_body", lambda model: 10)
    run = make_run(tenant, ASKING)
    progress.prepare(run.pk)
    run.refresh_from_db()
    assert (run.status, run.errored, run.batch) == (EvalRunStatus.COMPLETED, 2, None)
    assert "too long for the model" in run.items.first().answers


def test_no_run_begins_in_an_archived_project(tenant) -> None:
    project = create_project(
        organization=tenant.organization, name="Closed", is_private=False, by=tenant.owner, now=db_now()
    )
    evaluated = make_eval(tenant.organization, EXACT)
    Eval.objects.filter(pk=evaluated.pk).update(project_id=project.pk)
    evaluated.refresh_from_db()
    archive_project(organization=tenant.organization, id=project.pk, by=tenant.owner, now=db_now())

    with pytest.raises(InvalidState, match="is archived"):
        operations.create_run(
            evaluated=evaluated, name="", data_source={}, source=OFFLINE, metadata={}, cost_limit_nano=None, by="user_1"
        )


def test_a_text_is_refused_and_never_cut(db) -> None:
    whole = "x" * MAX_CHARACTERS
    assert fill("{{item}}", {"item": whole}) == whole
    for template in ("{{item}}y", "y" * (MAX_CHARACTERS + 1)):
        with pytest.raises(TextTooLong):
            fill(template, {"item": whole})
    message = TemplateMessage(role="user", content="{{item}}")
    with pytest.raises(TextTooLong):
        fill_messages([message] * (MAX_MESSAGES_CHARACTERS // MAX_CHARACTERS + 1), {"item": whole})


@pytest.mark.parametrize(
    ("criterion", "param"),
    [
        (labels(*["x" * MAX_CHARACTERS] * 5), "testing_criteria[0].input"),
        (labels("{{item.a}}" * 60, "{{item.b}}" * 60), "testing_criteria[0].input"),
        (
            SimilarityGrader("s", "{{item.a}}" * 60, "{{item.b}}" * 60, "bleu", 0.5),
            "testing_criteria[0].input",
        ),
        (
            ScoreModelCriterion(name="s", model="m", input=[], sampling_params={"temperature": 1}),
            "testing_criteria[0].sampling_params",
        ),
    ],
)
def test_a_criterion_that_is_too_long_or_sets_what_has_no_effect_is_refused(criterion, param) -> None:
    with pytest.raises(InvalidValue) as refused:
        check_criteria([criterion])
    assert refused.value.param == param


def test_half_of_a_surrogate_pair_in_an_answer_is_no_value(db) -> None:
    names = names_with(progress.SourceItem({}), '{"a": "\\ud800"}')
    assert "output_json" not in names["sample"]
    assert names_with(progress.SourceItem({}), '{"a": 1}')["sample"]["output_json"] == {"a": 1}


def test_criteria_and_sources_count_as_storage_and_are_limited(tenant) -> None:
    organization = tenant.organization.pk
    before = stored_bytes(organizations=[organization])[organization]
    run = make_run(tenant, OFFLINE, EXACT)
    after = stored_bytes(organizations=[organization])[organization]
    assert after - before == run.evaluated.bytes + run.bytes > 200

    long = [SimilarityGrader("s", "x" * 8_000, "y" * 8_000, "bleu", 0.5)] * 20
    with pytest.raises(InvalidValue, match="256 KiB"):
        make_eval(tenant.organization, *long)


@pytest.mark.parametrize(
    ("context_length", "tokens"), [(512, 256), (CONTEXT_LENGTH, CONTEXT_LENGTH // 2), (32_768, 1_024)]
)
def test_an_answer_leaves_half_of_a_short_context_to_its_prompt(tenant, context_length, tokens) -> None:
    BaseModel.objects.filter(name=BASE_MODEL).update(context_length=context_length)
    plan = plans.RunPlan(make_run(tenant, ASKING, EXACT))

    (body,) = plan.sampling(progress.SourceItem({"question": "a", "answer": "b"})).values()

    assert body["max_completion_tokens"] == tokens


def test_images_cost_the_whole_context_and_every_message_of_a_template_counts(tenant) -> None:
    body = {"model": BASE_MODEL, "max_completion_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    picture = [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]
    assert asked_by(body).input_tokens < CONTEXT_LENGTH
    assert asked_by(body | {"messages": [{"role": "user", "content": picture}]}).input_tokens >= CONTEXT_LENGTH
    unknown = labels(*["{{sample.output_json.a}}"] * 3)
    plan = plans.RunPlan(make_run(tenant, ASKING, unknown))
    (asked,) = quotes.gradings(plan, progress.SourceItem({"question": "one"}))
    assert asked.input_tokens == 4 * 3 * MAX_CHARACTERS


def test_a_run_that_meets_errors_fails_with_a_reason_and_releases_its_files(tenant, monkeypatch) -> None:
    run = make_run(tenant, ASKING)
    progress.prepare(run.pk)
    batch = ended(run, BatchStatus.COMPLETED)

    def gone(*given: object) -> None:
        raise ObjectMissing("gone")

    monkeypatch.setattr(progress, "_record_answers", gone)
    for _ in range(progress.MAX_ATTEMPTS):
        with pytest.raises(ObjectMissing):
            progress.go_on(batch.pk)
    progress.go_on(batch.pk)

    run.refresh_from_db()
    assert (run.status, run.error["code"]) == (EvalRunStatus.FAILED, "internal_error")
    assert not BatchFile.objects.filter(deleted_at=None).exists()


def test_a_run_killed_before_its_graders_were_asked_goes_on(tenant, monkeypatch) -> None:
    run = make_run(tenant, OFFLINE)

    def killed(plan: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(progress, "_grade", killed)
        progress.prepare(run.pk)
    progress.prepare(run.pk)

    run.refresh_from_db()
    assert (run.status, run.errored) == (EvalRunStatus.COMPLETED, 2)


def test_a_missing_answer_is_an_error_of_its_item_and_a_failed_batch_says_why(tenant) -> None:
    run = make_run(tenant, ASKING, StringCheckGrader("same", "x", "x", "eq"))
    progress.prepare(run.pk)
    progress.go_on(ended(run, BatchStatus.COMPLETED).pk)
    run.refresh_from_db()
    assert (run.status, run.errored) == (EvalRunStatus.COMPLETED, 2)
    assert "gave no answer" in run.items.first().answers

    refused = make_run(tenant, ASKING)
    progress.prepare(refused.pk)
    errors = [{"line": 1, "code": "line_too_long", "message": "A line may have up to 4 MiB.", "param": None}]
    progress.go_on(ended(refused, BatchStatus.FAILED, errors=errors).pk)
    refused.refresh_from_db()
    assert refused.error == {"code": "line_too_long", "message": "A line may have up to 4 MiB."}


@pytest.mark.parametrize("status", [BatchStatus.FINALIZING, BatchStatus.COMPLETED])
def test_a_run_is_canceled_while_its_batch_ends(tenant, status) -> None:
    run = make_run(tenant, ASKING)
    progress.prepare(run.pk)
    ended(run, status)
    run.refresh_from_db()

    canceled = operations.cancel_run(run=run, by="user_1", now=db_now())

    assert (canceled.status, Batch.objects.get(pk=run.batch_id).status) == (EvalRunStatus.CANCELED, status)


def test_a_page_of_large_rows_ends_early_and_reads_their_run_once(tenant, django_assert_num_queries) -> None:
    run = make_run(tenant, OFFLINE)
    progress.prepare(run.pk)
    EvalItem.objects.update(bytes=10)
    run.refresh_from_db()
    for most, shown in ((1, 1), (19, 1), (20, 2)):
        found, has_more = take(PageQuery(), list_items(run=run), order=("number", "id"), most_bytes=most)
        assert ([row.number for row in found], has_more) == (list(range(shown)), shown < 2)
    rendered = ItemRenderer(run)
    with django_assert_num_queries(0):
        assert [rendered.render(row)["run_id"] for row in found] == [run.pk] * 2


def test_a_file_that_is_long_to_read_ends_its_run(tenant) -> None:
    organization, now = tenant.organization, db_now()
    contents = {
        b"\n" * (MAX_LINES + 1) + b'{"item": {}}': "at most 1,000 items",
        b'{"item": {"n": 1e400}}': "no JSON object",
    }
    for content, said in contents.items():
        file = create_file(
            organization=organization, filename="items.jsonl", chunks=[content], by="user_1", now=now, purpose="evals"
        )
        run = make_run(tenant, JsonlSource(source=FileId(id=file.pk)))

        progress.prepare(run.pk)

        run.refresh_from_db()
        assert (run.status, run.error["code"]) == (EvalRunStatus.FAILED, "invalid_value"), said
        assert said in run.error["message"]


def test_a_run_compares_a_limited_number_of_characters(tenant, monkeypatch) -> None:
    monkeypatch.setattr(results, "MAX_COMPARED", 12)
    close = SimilarityGrader("close", "{{item.question}}", "one", "fuzzy_match", 0.5)
    run = make_run(tenant, OFFLINE, close, close)

    progress.prepare(run.pk)

    run.refresh_from_db()
    assert (run.status, run.passed, run.errored) == (EvalRunStatus.COMPLETED, 1, 1)
    assert "Use fewer items" in run.items.get(number=1).results


def test_open_batches_are_found_among_all_that_ever_were_by_an_index(tenant, django_assert_num_queries) -> None:
    progress.prepare(make_run(tenant, ASKING).pk)
    with django_assert_num_queries(2) as asked:
        assert len(worker._Worker(0.0)._current_batches()) == 1
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(f"EXPLAIN {asked.captured_queries[-1]['sql']}")
        assert "batch_active" in str(cursor.fetchall())


def test_a_deeply_nested_item_is_refused_and_no_error_of_ours(tenant) -> None:
    deep = b'{"a":' * 100 + b"1" + b"}" * 100
    file = create_file(
        organization=tenant.organization, filename="items.jsonl", by="user_1", now=db_now(), purpose="evals",
        chunks=[b'{"item": {"m": [{"role": "user", "content": %b}]}}' % deep],
    )  # fmt: skip
    asked = ItemReference(item_reference="item.m")
    run = make_run(tenant, CompletionsSource(source=FileId(id=file.pk), model=BASE_MODEL, input_messages=asked))

    progress.prepare(run.pk)

    run.refresh_from_db()
    assert (run.status, run.error["code"]) == (EvalRunStatus.FAILED, "invalid_value")
    assert "Line 1 is nested" in run.error["message"]


def test_numbers_that_no_answer_could_show_end_a_run_with_a_reason(tenant) -> None:
    wide = ScoreModelCriterion(name="s", model=BASE_MODEL, input=labels("x").input, range=[1e308, 1.7e308])
    assert wide.threshold == pytest.approx(1.35e308)
    file = create_file(
        organization=tenant.organization, filename="items.jsonl", by="user_1", now=db_now(), purpose="evals",
        chunks=[b'{"item": {"n": 1%s}, "sample": {"output_text": "x"}}\n' % (b"0" * 30) * 3],
    )  # fmt: skip
    run = make_run(tenant, JsonlSource(source=FileId(id=file.pk)), wide)
    reasons = {"1.6e308": "", "1" + "0" * 400: "no number from 1e+308 to 1.7e+308", "1e400": "cannot be read"}

    progress.prepare(run.pk)
    for number, text in enumerate(reasons):
        run.items.filter(number=number).update(answers=msgspec.json.encode({"g0": {"text": text}}).decode())
    run.refresh_from_db()
    progress.go_on(ended(run, BatchStatus.COMPLETED).pk)

    run.refresh_from_db()
    assert (run.status, run.passed, run.errored) == (EvalRunStatus.COMPLETED, 1, 2)
    for row, reason in zip(run.items.order_by("number"), reasons.values(), strict=True):
        (result,) = msgspec.json.decode(row.results)
        assert result["threshold"] == wide.threshold and reason in result.get("error", "")


def test_runs_of_organizations_that_share_are_limited_together(tenant, charlie, monkeypatch) -> None:
    monkeypatch.setattr(operations, "MAX_IN_AN_HOUR", 2)
    shared = [make_organization(f"Shared {number}", owner=charlie) for number in range(3)]

    def run(organization: Organization) -> None:
        operations.create_run(
            evaluated=make_eval(organization), name="n", data_source=msgspec.to_builtins(OFFLINE), source=OFFLINE,
            metadata={}, cost_limit_nano=None, by="user_1",
        )  # fmt: skip

    run(shared[0]), run(shared[1]), run(tenant.organization)
    EvalRun.objects.filter(organization=shared[0]).delete()  # as its owner may, once it has ended
    with pytest.raises(QuotaExceeded, match="2 runs of evals within an hour"):
        run(shared[2])


def test_an_eval_or_run_that_was_deleted_meanwhile_is_not_found(tenant) -> None:
    run = make_run(tenant, OFFLINE)
    evaluated = run.evaluated
    operations.cancel_run(run=EvalRun.objects.get(), by="user_1", now=db_now())
    operations.delete_eval(evaluated=Eval.objects.get(), by="user_1")

    with pytest.raises(NotFound):
        operations.delete_run(run=run, by="user_1")
    with pytest.raises(NotFound):
        operations.update_eval(evaluated=evaluated, name="new", metadata=None, by="user_1", now=db_now())
    with pytest.raises(NotFound):
        operations.create_run(
            evaluated=evaluated, name="again", data_source=msgspec.to_builtins(OFFLINE), source=OFFLINE,
            metadata={}, cost_limit_nano=None, by="user_1",
        )  # fmt: skip
