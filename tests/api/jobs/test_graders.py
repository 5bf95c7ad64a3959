"""Graders as calls of their own, and permissions of checkpoints, through the official SDK."""

import openai
import pytest

from apps.finetuning.recipes.checkpoint_names import name_of
from tests.factories.accounts import make_key
from tests.factories.finetuning import make_checkpoint
from tests.support.sdk import openai_client

EXACT = {
    "type": "string_check", "name": "exact", "operation": "ilike",
    "input": "{{sample.output_json.color}}", "reference": "{{ item.words.0 }}",
}  # fmt: skip
CLOSE = {
    "type": "text_similarity", "name": "close", "evaluation_metric": "fuzzy_match",
    "input": "{{sample.output_text}}", "reference": "kitten",
}  # fmt: skip
BOTH = {"type": "multi", "name": "both", "graders": {"a": EXACT, "b": CLOSE}, "calculate_output": "min(a, 1) / 2 + b^2"}


def test_a_grader_is_checked_and_tried_on_an_answer(sdk) -> None:
    graders = sdk.fine_tuning.alpha.graders

    assert graders.validate(grader=EXACT).grader.to_dict() == EXACT
    right = graders.run(grader=EXACT, model_sample='{"color": "Dark Red"}', item={"words": ["red"]})
    assert (right.reward, right.metadata.name, right.metadata.type) == (1.0, "exact", "string_check")
    assert not any(value for value in right.metadata.errors.to_dict().values())
    lost = graders.run(grader=EXACT, model_sample="red", item={"words": ["red"]})
    assert lost.reward == 0 and lost.metadata.errors.sample_parse_error
    nameless = graders.run(grader=EXACT, model_sample='{"color": "red"}', item=None)
    assert nameless.reward == 0 and nameless.metadata.errors.invalid_variable_error
    close = graders.run(grader=CLOSE, model_sample="sitting")
    assert close.reward == pytest.approx(8 / 13)
    both = graders.run(grader=BOTH, model_sample='{"color": "red"}', item={"words": ["red"]})
    assert set(both.sub_rewards) == {"a", "b"} and both.reward == pytest.approx(0.5 + both.sub_rewards["b"] ** 2)
    endless = graders.run(
        grader=BOTH | {"calculate_output": "1 / (a - 1)"}, model_sample='{"color": "red"}', item={"words": ["red"]}
    )
    assert endless.reward == 0 and endless.metadata.errors.formula_parse_error


@pytest.mark.parametrize(
    ("metric", "reward"),
    [
        ("bleu", pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)),
        ("gleu", pytest.approx(10 / 14)),
        ("rouge_1", pytest.approx(8 / 10)),
        ("rouge_2", pytest.approx(6 / 8)),
        ("rouge_5", 0.0),
        ("rouge_l", pytest.approx(8 / 10)),
    ],
)
def test_texts_are_compared_by_words(sdk, metric: str, reward: float) -> None:
    grader = CLOSE | {"evaluation_metric": metric, "reference": "the cat sat on mats"}
    assert sdk.fine_tuning.alpha.graders.run(grader=grader, model_sample="a cat sat on mats").reward == reward


@pytest.mark.parametrize(
    ("grader", "param", "code"),
    [
        ({"type": "python", "name": "p", "source": "def grade(): ..."}, "grader.type", "not_offered"),
        ({"type": "score_model", "name": "s", "model": "m", "input": []}, "grader.type", "not_offered"),
        (CLOSE | {"evaluation_metric": "cosine"}, "grader.evaluation_metric", "not_offered"),
        (BOTH | {"graders": {"a": {"type": "python"}}}, "grader.graders.a.type", "not_offered"),
        (BOTH | {"calculate_output": "a + __import__('os')"}, "grader.calculate_output", "invalid_value"),
        (BOTH | {"calculate_output": "(" * 300}, "grader.calculate_output", "invalid_value"),
        (BOTH | {"graders": {"a b": EXACT}}, "grader.graders", "invalid_value"),
        (EXACT | {"operation": "gt"}, "grader.operation", "invalid_value"),
        (EXACT | {"input": "{{sample.output_text}}" * 300}, "grader", "invalid_value"),
        ({"type": "magic"}, "grader.type", "invalid_value"),
    ],
)
def test_a_grader_that_cannot_be_used_is_refused_by_its_field(sdk, grader: dict, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.fine_tuning.alpha.graders.run(grader=grader, model_sample="x" * 100)

    assert (refused.value.param, refused.value.code) == (param, code), refused.value


def test_a_checkpoint_is_shared_with_no_one_and_says_so(sdk, floor, rival, charlie) -> None:
    model = name_of(make_checkpoint(floor.organization, floor.base_model, step=7))
    permissions = sdk.fine_tuning.checkpoints.permissions
    stranger = openai_client(make_key(rival, charlie)).fine_tuning.checkpoints.permissions

    assert list(permissions.list(model)) == [] and permissions.list(model).has_more is False
    with pytest.raises(openai.BadRequestError) as refused:
        permissions.create(model, project_ids=["proj_1"])
    with pytest.raises(openai.BadRequestError) as missing:
        permissions.delete("cp_1", fine_tuned_model_checkpoint=model)

    assert (refused.value.param, refused.value.code) == ("project_ids", "not_offered")
    assert (missing.value.param, missing.value.code) == ("permission_id", "not_offered")
    assert all("sees the project of this checkpoint's job" in each.value.message for each in (refused, missing))
    for ask in (
        lambda: stranger.list(model),
        lambda: stranger.create(model, project_ids=["proj_1"]),
        lambda: permissions.list(floor.base_model.name),
    ):
        with pytest.raises(openai.NotFoundError) as unknown:
            ask()
        assert unknown.value.code == "model_not_found"
