"""Every objective and method really trains, and what it delivers loads."""

import json

import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from apps.contracts.chat import ChatRenderer
from apps.contracts.failures import FailureCode
from apps.contracts.hyperparameters import Method, Objective
from apps.contracts.runs import EvaluationCompleted, StepCompleted
from gpu_workers.train.data.rows import Pairs, encode_pairs, encode_text
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.loop import callbacks
from gpu_workers.train.loop.dpo import DpoTrainer, dpo_config
from gpu_workers.train.loop.evaluation import Evaluation, evaluate
from gpu_workers.train.loop.orpo import OrpoTrainer, orpo_config
from gpu_workers.train.model.loading import load_model
from tests.support.engines.attempts import attempt
from tests.support.engines.models import BASE_MODEL
from tests.support.engines.rows import SMALL, make_pairs, make_rows, make_texts, unlike

ROWS = make_rows(32)
REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")


@pytest.fixture(autouse=True)
def report_every_step(monkeypatch):
    monkeypatch.setattr(callbacks, "REPORT_INTERVAL_SECONDS", 0.0)


def recipe_of(**changes):
    return msgspec.structs.replace(SMALL, **changes)


def trainer_arguments(config, recipe, model, work_dir):
    """Return what a trainer outside a run needs besides its model and rows."""
    return {
        "args": config({"output_dir": str(work_dir), "use_cpu": True, "bf16": False, "report_to": []}, recipe),
        "validation": None,
        "pad_id": 0,
        "processing_class": AutoTokenizer.from_pretrained(model),
        "spec": None,
        "work_dir": work_dir,
        "sampler": None,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"use_dora": True}, {"use_rslora": True}, {"method": Method.QLORA, "use_dora": True}],
    ids=["dora", "rslora", "qdora"],
)
def test_a_kind_of_adapter_learns_and_loads_in_peft(tiny_model, tmp_path, changes):
    tried = attempt(tmp_path, tiny_model, ROWS, recipe=recipe_of(**changes))

    steps = tried.of(StepCompleted)
    config = json.loads((tried.result / "adapter_config.json").read_text())
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tried.result)
    assert steps[-1].train_loss < steps[0].train_loss
    assert (config["use_dora"], config["use_rslora"]) == (
        changes.get("use_dora", False),
        changes.get("use_rslora", False),
    )
    prompt = torch.tensor([[3, 100, 200, 1, 4]])
    assert not torch.equal(loaded(prompt).logits, AutoModelForCausalLM.from_pretrained(tiny_model)(prompt).logits)


def test_an_evaluation_leaves_the_gradients_through_four_bits_as_they_were(tiny_model):
    """bitsandbytes lays the weights out anew in the first evaluation on some CPUs, where no gradient passes."""
    model = load_model(tiny_model, recipe_of(method=Method.QLORA, lora_dropout=0.0)).train()
    ids = torch.tensor([[3, 100, 200, 1, 4]])

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    before = gradients()
    with torch.no_grad():
        model.eval()(input_ids=ids)
    model.train()

    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients().items())
    assert any(gradient.any() for name, gradient in before.items() if "layers.0" in name)


@pytest.mark.slow
def test_full_training_delivers_a_whole_model(tiny_model, fully_trained):
    steps = fully_trained.of(StepCompleted)
    trained = AutoModelForCausalLM.from_pretrained(fully_trained.result)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert steps[-1].train_loss < steps[0].train_loss
    assert json.loads((fully_trained.result / "manifest.json").read_text())["kind"] == "model"
    changed = [n for n, p in trained.named_parameters() if not torch.equal(p, base.get_parameter(n))]
    assert len(changed) == len(list(base.named_parameters()))
    assert trained.dtype is torch.bfloat16
    assert AutoTokenizer.from_pretrained(fully_trained.result).chat_template


@pytest.mark.slow
def test_running_text_is_trained_to_its_last_token(tiny_model, tmp_path):
    (tmp_path / "texts.jsonl").write_bytes(make_texts(2))

    rows = encode_text(tmp_path / "texts.jsonl", ChatRenderer.from_folder(tiny_model), max_length=16)
    recipe = recipe_of(objective=Objective.TEXT, epochs=8, learning_rate=2e-2)
    tried = attempt(tmp_path / "run", tiny_model, make_texts(16), recipe=recipe)

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = tokenizer.decode([token for piece in rows.input_ids for token in piece])
    assert text.count("<|end|>") == 2
    assert text.replace("<|end|>", "") == "".join(json.loads(line)["text"] for line in make_texts(2).splitlines())
    assert all(labels[0] == -100 and -100 not in labels[1:] for labels in rows.labels)
    steps = tried.of(StepCompleted)
    assert steps[-1].train_loss < steps[0].train_loss - 0.5
    assert steps[-1].train_mean_token_accuracy > 0.3 > steps[0].train_mean_token_accuracy


@pytest.mark.slow
def test_preferences_are_learned(tiny_model, tmp_path):
    recipe = recipe_of(objective=Objective.DPO, gradient_accumulation_steps=2)

    tried = attempt(tmp_path, tiny_model, make_pairs(32), recipe=recipe, validation=unlike(make_pairs(8)))

    steps, evaluations = tried.of(StepCompleted), tried.of(EvaluationCompleted)
    assert steps[0].train_loss == pytest.approx(0.6931, abs=1e-3)  # ln 2: nothing is preferred yet
    assert steps[-1].train_loss < 0.65
    assert steps[-1].train_mean_token_accuracy == 1.0
    assert evaluations[-1].valid_loss < evaluations[0].valid_loss < 0.6931
    assert tried.outcome.trained_tokens == steps[-1].trained_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_preferences_are_learned_without_a_reference(tiny_model, tmp_path, method):
    recipe = recipe_of(objective=Objective.ORPO, method=method, gradient_accumulation_steps=2)

    tried = attempt(tmp_path, tiny_model, make_pairs(32), recipe=recipe, validation=unlike(make_pairs(8)))

    steps, evaluations = tried.of(StepCompleted), tried.of(EvaluationCompleted)
    assert steps[-1].train_loss < steps[0].train_loss
    assert evaluations[-1].valid_loss < evaluations[0].valid_loss
    assert evaluations[-1].valid_mean_token_accuracy >= evaluations[0].valid_mean_token_accuracy
    assert tried.outcome.trained_tokens == steps[-1].trained_tokens > 0
    assert json.loads((tried.result / "manifest.json").read_text())["kind"] == "adapter"


def test_a_pair_costs_what_trl_says_without_a_reference(tiny_model, tmp_path):
    """TRL counts the prompt as learned, so that both agree where it is one token, which nothing predicts."""
    ids = {"prompt_ids": [3], "chosen_ids": [100, 200, 4], "rejected_ids": [101, 4]}
    pairs = Pairs([(ids["prompt_ids"], ids["chosen_ids"], ids["rejected_ids"])], n_dropped=0, n_truncated=0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    arguments = trainer_arguments(orpo_config, recipe_of(orpo_beta=0.7), tiny_model, tmp_path)
    trainer = OrpoTrainer(model=model, rows=pairs, **arguments)
    theirs = {}
    for name in ("chosen", "rejected"):
        whole = torch.tensor([ids["prompt_ids"] + ids[f"{name}_ids"]])
        labels = whole.clone()
        labels[:, 0] = -100
        theirs |= {f"{name}_input_ids": whole, f"{name}_labels": labels}
        theirs[f"{name}_attention_mask"] = torch.ones_like(whole)

    ours, n_right, n_pairs = trainer.loss_parts(model, trainer.eval_collator(pairs.items(range(1))))
    expected, metrics = trainer.get_batch_loss_metrics(model, theirs)

    assert ours.item() == pytest.approx(expected.item(), rel=1e-4)
    assert (n_right.item(), n_pairs.item()) == (metrics["rewards/accuracies"], 1)


@pytest.mark.parametrize("method", [Method.LORA, Method.FULL])
def test_the_reference_of_an_adapter_is_on_its_device_even_if_the_base_is_not(
    tiny_model, tmp_path, monkeypatch, method
):
    recipe = recipe_of(objective=Objective.DPO, method=method)
    pairs = Pairs([([3], [100, 200, 4], [101, 4])], n_dropped=0, n_truncated=0)
    original = DPOTrainer.__init__

    def build(trainer, *args, **kwargs):
        original(trainer, *args, **kwargs)
        for name, module in trainer.model.named_modules():
            if name.endswith(".default"):
                module.to("meta")  # stands for the GPU

    monkeypatch.setattr(DPOTrainer, "__init__", build)
    monkeypatch.setattr(
        DpoTrainer,
        "_precompute_ref_logps",
        lambda _, dataset, *__: dataset.add_column(REFERENCES[0], [0.0]).add_column(REFERENCES[1], [0.0]),
    )
    trainer = DpoTrainer(
        model=load_model(tiny_model, recipe),
        rows=pairs,
        train_dataset=pairs.as_dataset(),
        **trainer_arguments(dpo_config, recipe, tiny_model, tmp_path),
    )

    devices = {name: parameter.device.type for name, parameter in trainer.model.named_parameters()}
    assert {device for name, device in devices.items() if ".ref." in name} == (
        {"meta"} if method is Method.LORA else set()
    )
    assert {device for name, device in devices.items() if "lora_" not in name} == {"cpu"}


def test_an_evaluation_gives_rows_to_the_device_that_computes_not_to_that_of_the_weights():
    """Offloaded weights are in the host's memory, and a pair's reference must be where its loss is."""
    pairs = Pairs([([3], [100, 200, 4], [101, 4])], n_dropped=0, n_truncated=0)

    def loss_parts(_, batch):
        assert {tensor.device.type for tensor in batch.values()} == {"cpu"}
        return torch.tensor(1.0), torch.tensor(1), torch.tensor(1)

    found = evaluate(
        torch.nn.Linear(1, 1, device="meta"),
        pairs,
        device=torch.device("cpu"),
        collate=DataCollatorForPreference(pad_token_id=0),
        batch_size=1,
        loss_parts=loss_parts,
        should_stop=lambda: False,
    )

    assert found == Evaluation(valid_loss=1.0, valid_mean_token_accuracy=1.0)


def test_pairs_are_tokenised_as_trl_does_it(tmp_path):
    (tmp_path / "pairs.jsonl").write_bytes(make_pairs(4))
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    source = [json.loads(line) for line in make_pairs(4).splitlines()]

    ours = encode_pairs(tmp_path / "pairs.jsonl", ChatRenderer.from_folder(BASE_MODEL), max_length=64).rows

    for row, pair in zip(source, ours, strict=True):
        prompt = tokenizer.apply_chat_template(row["input"]["messages"], add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template(row["input"]["messages"] + row["preferred_output"])["input_ids"]
        assert pair["prompt_ids"] == prompt
        assert prompt + pair["chosen_ids"] == whole[: len(prompt) + len(pair["chosen_ids"])]
        assert tokenizer.decode(pair["rejected_ids"]) == "I do not know<|end|>"


def test_a_bad_preference_row_is_named_by_its_line(tmp_path):
    (tmp_path / "pairs.jsonl").write_bytes(make_pairs(2) + b'\n{"input": {"messages": []}}\n')

    with pytest.raises(TrainingFailed, match="Line 3") as failure:
        encode_pairs(tmp_path / "pairs.jsonl", ChatRenderer.from_folder(BASE_MODEL), max_length=64)

    assert failure.value.code is FailureCode.INVALID_TRAINING_FILE


@pytest.mark.slow
def test_a_job_begins_with_the_adapter_it_continues(tiny_model, trained, tmp_path):
    second = attempt(tmp_path, tiny_model, ROWS, start=trained.result)

    assert second.of(StepCompleted)[0].train_loss < trained.of(StepCompleted)[2].train_loss
    assert second.outcome.train_loss < trained.outcome.train_loss


@pytest.mark.slow
def test_full_training_begins_with_a_model_or_with_an_adapter_merged(tiny_model, trained, fully_trained, tmp_path):
    full = recipe_of(method=Method.FULL, learning_rate=1e-3)

    after_adapter = attempt(tmp_path / "a", tiny_model, ROWS, recipe=full, start=trained.result)
    after_model = attempt(tmp_path / "m", tiny_model, ROWS, recipe=full, start=fully_trained.result)

    fresh = fully_trained.of(StepCompleted)[0].train_loss
    assert after_adapter.of(StepCompleted)[0].train_loss < fresh - 0.3
    assert after_model.of(StepCompleted)[0].train_loss < fresh - 0.1


def test_an_adapter_of_another_rank_is_refused_as_a_beginning(tiny_model, trained, tmp_path):
    with pytest.raises(TrainingFailed, match="another rank"):
        attempt(tmp_path, tiny_model, ROWS, recipe=recipe_of(lora_rank=8), start=trained.result)
