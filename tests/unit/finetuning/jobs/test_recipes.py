"""The values chosen for an open recipe, their reasons, and the values that are refused."""

import pytest

from apps.catalog.models import BaseModel
from apps.contracts.hyperparameters import Method, Objective
from apps.core.errors import InvalidValue
from apps.estimates.durations import step_count
from apps.finetuning.recipes.completion import DataFacts, choose
from apps.finetuning.recipes.limits import get_limits

MODEL = BaseModel(name="m", context_length=4096, parameter_count=1, config={"architectures": ["LlamaForCausalLM"]})
OWN = BaseModel(name="own", context_length=512, parameter_count=1, default_recipe={"learning_rate": 1e-3, "epochs": 2})

FAST = BaseModel(name="fast", context_length=512, parameter_count=1, default_recipe={"learning_rate": 3e-3})


def recipe_of(base_model=MODEL, method=Method.LORA, asked=None, **more):
    return choose(base_model=base_model, method=method, asked=asked or {}, **more)


def reasons(recipe):
    return {choice.name: choice.reason for choice in recipe.choices}


def test_every_value_has_a_reason_and_says_who_chose_it():
    recipe = recipe_of(asked={"epochs": 4, "batch_size": "auto"}, data=DataFacts(rows=412, has_validation=True))

    by_name = {choice.name: choice for choice in recipe.choices}
    assert all(choice.reason.endswith(".") for choice in recipe.choices)
    assert (by_name["epochs"].value, by_name["epochs"].is_auto) == (4, False)
    assert by_name["batch_size"].is_auto
    assert recipe.hyperparameters.epochs == 4


def test_few_rows_are_seen_often_and_stop_early_where_they_can_be_checked():
    recipe = recipe_of(data=DataFacts(rows=412, has_validation=True))

    assert reasons(recipe)["epochs"] == "412 rows: 3 epochs."
    assert recipe.hyperparameters.early_stopping_patience == 2
    assert recipe_of(data=DataFacts(rows=412)).hyperparameters.early_stopping_patience is None
    assert recipe_of(data=DataFacts(rows=300_000)).hyperparameters.epochs == 1


@pytest.mark.parametrize(
    ("data", "asked", "share"),
    [
        (DataFacts(rows=499), {}, 0.0),
        (DataFacts(rows=500), {}, 0.05),
        (DataFacts(rows=10_003), {}, 0.01),
        (DataFacts(rows=10_003, has_validation=True), {}, 0.0),
        (DataFacts(rows=10_003), {"validation_share": 0.0}, 0.0),
        (DataFacts(), {}, 0.0),
    ],
)
def test_without_a_validation_file_some_of_many_rows_are_held_out(data, asked, share):
    recipe = recipe_of(asked=asked, data=data)

    assert recipe.hyperparameters.validation_share == share
    assert (recipe.hyperparameters.early_stopping_patience is None) == (not share and not data.has_validation)


@pytest.mark.parametrize("rows", [40, 412, 10_003, 40_000, 300_000])
@pytest.mark.parametrize("held_out", [{"has_validation": True}, {}])
def test_early_stopping_is_promised_only_where_it_can_still_save_steps(rows, held_out):
    asked = {} if held_out else {"validation_share": 0.1}
    recipe = recipe_of(asked=asked, data=DataFacts(rows=rows, **held_out)).hyperparameters
    trained = rows if held_out else round(rows * 0.9)
    steps = step_count(rows=trained, batch_size=recipe.batch_size, epochs=recipe.epochs)
    last_useful = recipe.eval_steps * (1 + recipe.early_stopping_patience)  # the first evaluation was the best

    assert last_useful < steps
    assert -(-steps // recipe.eval_steps) >= recipe.early_stopping_patience + 2


@pytest.mark.parametrize(
    ("asked", "data"),
    [
        ({"early_stopping_patience": 2}, DataFacts(rows=412)),
        ({}, DataFacts(rows=12, has_validation=True)),
        ({"epochs": 3}, DataFacts(has_validation=True)),
    ],
    ids=["nothing held out", "too few steps", "rows not counted yet"],
)
def test_without_enough_evaluations_early_stopping_is_off_and_says_so(asked, data):
    recipe = recipe_of(asked={"epochs": 1} | asked, data=data)

    assert recipe.hyperparameters.early_stopping_patience is None
    assert reasons(recipe)["early_stopping_patience"].startswith("Early stopping off: ")


def test_many_epochs_are_evaluated_at_their_ends_and_the_distance_is_ours_to_choose():
    assert (
        recipe_of(asked={"epochs": 8}, data=DataFacts(rows=412, has_validation=True)).hyperparameters.eval_steps is None
    )
    with pytest.raises(InvalidValue):
        recipe_of(asked={"eval_steps": 5})


@pytest.mark.parametrize(
    ("method", "objective", "rate"),
    [
        (Method.LORA, Objective.SUPERVISED, 2e-4),
        (Method.FULL, Objective.SUPERVISED, 2e-5),
        (Method.QLORA, Objective.TEXT, 1e-4),
        (Method.LORA, Objective.DPO, 1e-5),
    ],
)
def test_the_learning_rate_follows_method_and_objective(method, objective, rate):
    recipe = recipe_of(method=method, objective=objective)

    assert recipe.hyperparameters.learning_rate == rate
    assert "because" in reasons(recipe)["learning_rate"]


def test_a_models_own_recipe_counts_where_it_was_measured():
    assert recipe_of(OWN).hyperparameters.learning_rate == 1e-3
    assert recipe_of(OWN, method=Method.FULL).hyperparameters.learning_rate == 2e-5
    assert recipe_of(OWN, asked={"learning_rate_multiplier": 2}).hyperparameters.learning_rate == 2e-3


def test_the_largest_multiplier_is_named_and_works():
    with pytest.raises(InvalidValue) as refused:
        recipe_of(method=Method.LORA, asked={"learning_rate_multiplier": 1e4})
    assert "from 0.001 to 1,000." in str(refused.value)

    with pytest.raises(InvalidValue) as refused:
        recipe_of(FAST, asked={"learning_rate_multiplier": 400})
    assert refused.value.param == "hyperparameters.learning_rate_multiplier"
    assert "from 0.001 to 333.333." in str(refused.value)
    assert recipe_of(FAST, asked={"learning_rate_multiplier": 333.333}).hyperparameters.learning_rate < 1


def test_a_mixture_of_experts_adapts_its_attention_and_says_why():
    mixture = BaseModel(name="moe", context_length=4096, config={"architectures": ["Qwen3MoeForCausalLM"]})

    recipe, limits = recipe_of(mixture), get_limits(base_model=mixture)

    assert recipe.hyperparameters.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert "one tensor" in reasons(recipe)["target_modules"]
    assert {kind.key: bool(kind.note) for kind in limits.kinds if kind.delivered_as == "adapter"} == {
        "lora": False,
        "qlora": True,
    }
    with pytest.raises(InvalidValue, match="target_modules"):
        recipe_of(mixture, asked={"target_modules": ["down_proj"]})


def test_rslora_scales_by_the_root_of_the_rank():
    assert recipe_of(asked={"lora_rank": 64}).hyperparameters.lora_alpha == 128
    assert recipe_of(asked={"lora_rank": 64, "use_rslora": True}).hyperparameters.lora_alpha == 16


@pytest.mark.parametrize(
    ("asked", "method"),
    [
        ({"lora_rank": 7}, Method.LORA),
        ({"epochs": 0}, Method.LORA),
        ({"epochs": 1.5}, Method.LORA),
        ({"learning_rate": True}, Method.LORA),
        ({"target_modules": ["lm_head"]}, Method.LORA),
        ({"target_modules": []}, Method.LORA),
        ({"use_dora": 1}, Method.LORA),
        ({"use_dora": True}, Method.FULL),
        ({"gradient_checkpointing": True}, Method.LORA),
        ({"nonsense": 1}, Method.LORA),
    ],
)
def test_what_lies_outside_the_limits_is_refused_by_name(asked, method):
    with pytest.raises(InvalidValue) as refused:
        recipe_of(method=method, asked=asked)

    [name] = asked
    assert refused.value.param.endswith(name)


@pytest.mark.parametrize(
    ("longest", "objective", "chosen", "why"),
    [
        (None, Objective.SUPERVISED, 256, "256 tokens: the tested default of this model."),
        (99, Objective.SUPERVISED, 256, "256 tokens: your longest row has 99, so none is cut."),
        (300, Objective.SUPERVISED, 512, "512 tokens: your longest row has 300, so none is cut."),
        (600, Objective.DPO, 800, "800 tokens: your longest row has 600, so none is cut."),
        (900, Objective.SUPERVISED, 800, "800 tokens: the model's context length; your longest row has 900."),
        (600, Objective.TEXT, 256, "256 tokens: the tested default of this model."),
    ],
)
def test_the_longest_row_cuts_nothing_where_the_model_can(longest, objective, chosen, why):
    model = BaseModel(name="own", context_length=800, parameter_count=1, default_recipe={"max_length": 256})

    recipe = recipe_of(model, objective=objective, data=DataFacts(rows=50, longest_row_tokens=longest))

    assert (recipe.hyperparameters.max_length, reasons(recipe)["max_length"]) == (chosen, why)


@pytest.mark.parametrize(
    ("longest", "chosen"), [(52, 256), (257, 512), (30_000, 32_768), (40_000, 40_960), (99_999, 40_960), (None, 40_960)]
)
def test_without_a_recipe_of_its_own_a_model_takes_the_least_that_holds_every_row(longest, chosen):
    model = BaseModel(name="plain", context_length=40_960, parameter_count=1, default_recipe={})

    assert recipe_of(model, data=DataFacts(rows=50, longest_row_tokens=longest)).hyperparameters.max_length == chosen


def test_limits_say_what_is_served_and_what_is_only_delivered():
    kinds = {kind.name: kind.delivered_as for kind in get_limits(base_model=MODEL).kinds}

    assert kinds == {
        "LoRA": "adapter",
        "QLoRA": "adapter",
        "DoRA": "model",
        "QDoRA": "model",
        "Full fine-tuning": "model",
    }
    assert get_limits(base_model=MODEL).of("max_length").maximum == 4096


@pytest.mark.parametrize("asked", [{"lora_rank": 8, "lora_alpha": 1024}, {"lora_alpha": 512, "use_rslora": True}])
def test_an_alpha_that_no_replica_serves_is_refused_before_it_is_trained(asked):
    with pytest.raises(InvalidValue, match="no replica serves") as refused:
        recipe_of(asked=asked)

    assert refused.value.param == "hyperparameters.lora_alpha"
    assert recipe_of(asked=asked | {"lora_alpha": 64}).hyperparameters.lora_alpha == 64


def test_a_row_longer_than_any_model_reads_is_refused_not_cut():
    with pytest.raises(InvalidValue) as refused:
        recipe_of(asked={"max_length": 99_999_999})

    assert refused.value.param == "hyperparameters.max_length"
    assert recipe_of(asked={"max_length": 100_000}).hyperparameters.max_length == 4096
