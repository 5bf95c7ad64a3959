"""Configurations of other tools as plans: what their keys, files and columns mean here."""

import json
from pathlib import Path
from typing import Any

import pytest
from anneal.migration.base_models import suggest
from anneal.migration.configs import plan_of_config
from anneal.migration.importing import Memory, convert_and_check
from anneal.migration.plans import Plan

PAIRS = [{"instruction": f"Say {n}", "output": str(n)} for n in range(12)]


def planned(
    tool: str, folder: Path, *, data: Path | None = None, validation_data: Path | None = None, **members: object
) -> Plan:
    """Return the plan of a configuration in the folder."""
    (folder / "config.json").write_text(json.dumps(members))
    return plan_of_config(
        tool,
        folder / "config.json",
        data=data,
        validation_data=validation_data,
        catalogue=["anneal-demo"],
        chosen={},
    )


def test_settings_keep_their_meaning(tmp_path, monkeypatch) -> None:
    work, configs = tmp_path / "work", tmp_path / "examples"
    (work / "data").mkdir(parents=True)
    configs.mkdir()
    (work / "data/rows.json").write_text(json.dumps(PAIRS))
    (work / "data/dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.json"}}))
    monkeypatch.chdir(work)
    words = {"model_name_or_path": "anneal-demo", "dataset": "mine", "stage": "dpo", "pref_beta": 0.2}

    dpo = planned("llama-factory", configs, **words, lora_rank=128, lora_alpha=256, lora_dropout=0.05)
    orpo = planned("llama-factory", configs, **words, pref_loss="orpo", lora_rank=128, lora_alpha=64, use_rslora=True)

    assert dpo.obstacle is None and dpo.files["training_file"].samefile(work / "data/rows.json")
    assert dpo.request["recipe"] == {"method": "lora", "lora_rank": 64, "lora_alpha": 128, "dpo_beta": 0.2}
    assert (orpo.request["recipe"]["orpo_beta"], orpo.request["recipe"]["lora_alpha"]) == (0.2, 45)
    (work / "data/rows.json").write_text(json.dumps(PAIRS[1:]))
    again = planned("llama-factory", configs, **words, lora_rank=128, lora_alpha=256, lora_dropout=0.05)
    assert again.key != dpo.key, "other rows"

    scheduler = {"lr_scheduler_type": "linear", "lr_scheduler_args": {"min_lr_ratio": 0.1}}
    modules = {"type": "Lora", "lora_r": 8, "lora_trainable_modules": "q_proj,v_proj"}
    file = str(work / "data/rows.json")
    together = planned(
        "together", configs, model="anneal-demo", training_file=file, lr_scheduler=scheduler, training_type=modules
    )
    assert together.request["recipe"]["target_modules"] == ["q_proj", "v_proj"]
    assert "lr_scheduler_args {…}: unsupported." in " ".join(setting.line for setting in together.settings)


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        ("gpt-4o-2024-08-06", "big-70b", "you chose it"),
        ("gpt-4o-mini-2024-07-18", "qwen3-8b", "a model of about 8 billion parameters"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b-instruct", "its instruct version"),
        ("Qwen/Qwen3-8B", "qwen3-8b", "the same model"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3", "the same model"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3", "its base version"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama-3.1-8b-instruct", "the same model"),
        ("Qwen/Qwen2___5-7B-Instruct", "qwen2.5-7b-instruct", "the same model"),
    ],
)
def test_a_base_model_is_chosen_for_the_model_that_was_meant(source, name, reason) -> None:
    catalogue = ["qwen3-8b", "llama-3.1-8b-instruct", "big-70b", "mistral-7b-v0.3", "qwen2.5-7b-instruct"]

    found = suggest(source, catalogue=catalogue, chosen={"gpt-4o": "big-70b"})

    assert found.model == name and found.reason.startswith(reason)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))


def checked(plan: Plan, folder: Path) -> Plan:
    """Return the plan after its files were checked."""
    assert plan.obstacle is None
    convert_and_check(plan, Memory(folder / "import", "http://testserver"))
    return plan


ASKED = {"from": "human", "value": "Hi"}
BETTER, WORSE = {"from": "gpt", "value": "Hello!"}, {"from": "gpt", "value": "What?"}


@pytest.mark.parametrize(
    ("stage", "row", "entry", "method"),
    [
        ("pt", {"text": "Once upon a time."}, {"columns": {"prompt": "text"}}, "text"),
        ("sft", {"q": "Hi", "output": "Hello!"}, {"columns": {"prompt": "q"}}, "supervised"),
        (
            "sft",
            {"dialog": [ASKED, BETTER]},
            {"formatting": "sharegpt", "columns": {"messages": "dialog"}},
            "supervised",
        ),
        (
            "dpo",
            {"talk": [ASKED], "good": BETTER, "bad": WORSE},
            {
                "formatting": "sharegpt",
                "ranking": True,
                "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"},
            },
            "dpo",
        ),
        (
            "dpo",
            {"question": "Hi", "good": "Hello!", "bad": "What?"},
            {"ranking": True, "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"}},
            "dpo",
        ),
    ],
)
def test_columns_of_llama_factory_are_read_by_the_stage(tmp_path, stage, row, entry, method) -> None:
    write_rows(tmp_path / "data/rows.json", [row] * 12)
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.json"} | entry}))
    words = {"model_name_or_path": "anneal-demo", "dataset": "mine", "stage": stage}

    plan = checked(planned("llama-factory", tmp_path, **words), tmp_path)

    assert (plan.obstacle, plan.request["method"]) == (None, {"type": method})


@pytest.mark.parametrize(
    ("row", "entry", "method"),
    [
        ({"body": "Once upon a time."}, {"path": "data/rows.json", "type": "completion", "field": "body"}, "text"),
        ({"question": "Hi", "answer": "Hello!"}, {"path": "json", "data_files": "data/rows.json"}, "supervised"),
        ({"question": "Hi", "answer": "Hello!"}, {"path": "data", "data_files": ["rows.json"]}, "supervised"),
        (
            {"context": "Hi", "target": "Hello!"},
            {"path": "data/rows.json", "type": {"field_instruction": "context", "field_output": "target"}},
            "supervised",
        ),
        (
            {"dialog": [ASKED, BETTER]},
            {"path": "data/rows.json", "type": "chat_template", "field_messages": "dialog"},
            "supervised",
        ),
        (
            {"talk": [ASKED], "good": BETTER, "bad": WORSE},
            {"path": "data/rows.json", "field_messages": "talk", "field_chosen": "good", "field_rejected": "bad"},
            "supervised",
        ),
    ],
)
def test_data_sets_of_axolotl_are_found_and_their_columns_read(tmp_path, row, entry, method) -> None:
    write_rows(tmp_path / "data/rows.json", [row] * 12)

    plan = checked(planned("axolotl", tmp_path, base_model="anneal-demo", adapter="lora", datasets=[entry]), tmp_path)

    assert (plan.obstacle, plan.request["method"]) == (None, {"type": method})


ASKED_ONLY = {"messages": [{"role": "user", "content": "Hi"}]}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Hello!", "What?"))


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"chosen": GOOD, "rejected": BAD, "target": "a greeting"}, {}),
        ({"good": GOOD, "bad": BAD, "answer": "a greeting"}, {"field_chosen": "good", "field_rejected": "bad"}),
    ],
)
def test_rows_with_two_answers_need_no_ideal_one(tmp_path, row, fields) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(ASKED_ONLY | row | {"n": number}) + "\n" for number in range(12)))
    entry = {"path": "rows.jsonl", "type": "chat_template.default", "field_messages": "messages"} | fields

    plan = checked(planned("axolotl", tmp_path, base_model="anneal-demo", rl="dpo", datasets=[entry]), tmp_path)

    assert (plan.obstacle, plan.files) == (None, {"training_file": rows})


def outcomes(plan: Plan) -> dict[str, str]:
    return {setting.name: setting.outcome for setting in plan.settings}


def test_only_settings_that_change_the_training_are_unsupported(tmp_path) -> None:
    write_rows(tmp_path / "rows.json", PAIRS)
    words = {
        "base_model": "anneal-demo", "adapter": "qlora", "datasets": [{"path": "rows.json", "type": "alpaca"}],
        "learning_rate": "2e-4", "lora_target_modules": r"layers.[\d]+.(mlp|attn).(up|down)_proj",
        "group_by_length": False, "bnb_4bit_quant_type": "nf4", "lora_fan_in_fan_out": False, "hub_model_id": "a/b",
        "lora_mlp_kernel": True, "neftune_noise_alpha": 5,
    }  # fmt: skip

    plan = planned("axolotl", tmp_path, **words)

    assert plan.request["recipe"] == {"method": "qlora", "learning_rate": 0.0002}
    unsupported = {name for name, outcome in outcomes(plan).items() if outcome == "unsupported"}
    assert unsupported == {"lora_target_modules", "neftune_noise_alpha"}


@pytest.mark.parametrize(
    ("tool", "members", "recipe"),
    [
        (
            "together",
            {"random_seed": 7, "packing": False, "max_seq_length": 512, "early_stopping_patience": 3}
            | {"early_stopping_enabled": True},
            {"seed": 7, "packing": False, "max_length": 512, "early_stopping_patience": 3},
        ),
        (
            "together",
            {"early_stopping_enabled": False, "early_stopping_patience": 3},
            {"early_stopping_patience": None},
        ),
        ("together", {"early_stopping_patience": 3}, {}),
        ("llama-factory", {"quantization_bit": 4}, {"method": "qlora"}),
        ("llama-factory", {"quantization_bit": 8}, {}),
    ],
)
def test_keys_of_one_tool_are_mapped_or_ignored_as_their_values_say(tmp_path, tool, members, recipe) -> None:
    write_rows(tmp_path / "rows.json", PAIRS)
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.json"}}))
    named = {
        "together": {"model": "anneal-demo", "training_file": "rows.json"},
        "llama-factory": {"model_name_or_path": "anneal-demo", "dataset": "mine", "dataset_dir": str(tmp_path)},
    }[tool]

    plan = planned(tool, tmp_path, **named, **members)

    assert (plan.obstacle, plan.request["recipe"]) == (None, {"method": "lora"} | recipe)
    is_used = {"together": bool(members.get("early_stopping_enabled")), "llama-factory": "method" in recipe}[tool]
    told = {outcomes(plan)[name] for name in members if name != "early_stopping_enabled"}
    assert told == {"mapped" if is_used else "ignored"}


@pytest.mark.parametrize(
    ("tool", "members", "rows"),
    [
        ("axolotl", {"micro_batch_size": 2, "batch_size": 32}, 32),
        ("axolotl", {"micro_batch_size": 2, "gradient_accumulation_steps": 4}, 8),
        ("llama-factory", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, 16),
        ("llama-factory", {"gradient_accumulation_steps": 8}, 64),
    ],
)
def test_a_step_has_as_many_rows_as_with_the_tool(tmp_path, monkeypatch, tool, members, rows) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data/rows.json", PAIRS)
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.json"}}))
    named = {
        "axolotl": {"base_model": "anneal-demo", "datasets": [{"path": "data/rows.json", "type": "alpaca"}]},
        "llama-factory": {"model_name_or_path": "anneal-demo", "dataset": "mine", "stage": "sft"},
    }[tool]

    plan = planned(tool, tmp_path, **named, **members)

    assert plan.request["recipe"]["batch_size"] == rows
    assert "unsupported" not in {outcomes(plan).get(name) for name in members}


def test_jobs_read_from_a_service_need_only_their_files(tmp_path) -> None:
    write_rows(tmp_path / "rows.json", PAIRS)
    data = tmp_path / "rows.json"
    together = planned(
        "together", tmp_path, data=data, model="anneal-demo", training_file="file-1", validation_file="",
        status="completed", events=[{"message": "ended"}], token_count=10, total_price=5, from_checkpoint="",
    )  # fmt: skip
    words = {"trainingConfig": {"baseModel": "a/b/anneal-demo", "loraRank": 8, "outputModel": "accounts/a/models/bot"}}
    words |= {"dataset": "accounts/a/datasets/rows", "lossConfig": {"method": "DPO", "klBeta": 0.2}, "state": "DONE"}
    fireworks = planned("fireworks", tmp_path, data=data, **words)

    assert (together.obstacle, fireworks.obstacle) == (None, None)
    assert "unsupported" not in {*outcomes(together).values(), *outcomes(fireworks).values()}
    assert (fireworks.request["method"], fireworks.request["suffix"]) == ({"type": "dpo"}, "bot")
    assert fireworks.request["recipe"] == {"method": "lora", "lora_rank": 8, "dpo_beta": 0.2}

    words |= {"evaluationDataset": "accounts/a/datasets/eval"}
    assert "--validation-data" in (planned("fireworks", tmp_path, data=data, **words).obstacle or "")
    given = planned("fireworks", tmp_path, data=data, validation_data=data, **words)
    assert given.obstacle is None and set(given.files) == {"training_file", "validation_file"}


def test_a_configuration_without_one_data_set_says_so(tmp_path) -> None:
    words = {"model_name_or_path": "anneal-demo", "do_predict": True}

    none = planned("llama-factory", tmp_path, **words)
    two = planned("llama-factory", tmp_path, **words, dataset="identity,alpaca_en_demo")

    assert none.obstacle == "The configuration names no data to train on. Give it by --data."
    assert (two.obstacle or "").startswith("It names 2 data sets.")
