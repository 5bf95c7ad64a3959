"""What follows training: base and tuned compared, the parity probe, the merged model; on a real small model."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from apps.contracts.evaluation import EvaluationPlan, EvaluationReport, Grader, GraderKind
from apps.contracts.hyperparameters import Hyperparameters, Method, Objective
from apps.contracts.parity import PARITY_FILE, ParityProbe
from apps.contracts.runs import BaseModelRef, DatasetRef, Manifest, RunSpec
from apps.contracts.worker_api import JudgeAccess
from gpu_workers.common.artifacts import seal_folder, verify_folder
from gpu_workers.train.after.merge import NotMergeable, merge_adapter
from gpu_workers.train.after.publish import make
from gpu_workers.train.model.adapter_export import adapter_config
from gpu_workers.trainer.publication import EVALUATION, GGUF_EXPORT, MERGED_EXPORT, Made, PublishSecrets
from tests.support.engines.rows import RECIPE, make_rows, unlike
from tests.twins.http_server import Answer, Request, serve_http


def publish(work_dir: Path, spec: RunSpec, **secrets: Any) -> dict[str, Made]:
    """Make every part, as the agent has its children do one after the other."""
    parts = (EVALUATION, *spec.exports)
    return {part: make(work_dir, spec, PublishSecrets(part=part, **secrets)) for part in parts}


def make_spec(tiny_model: Path, *, rows: int = 12, recipe: Hyperparameters = RECIPE, **fields: Any) -> RunSpec:
    file = DatasetRef(id="ds", sha256="", bytes=1, rows=rows, url="")
    return RunSpec(
        run_id="run_1",
        job_id="ftjob-1",
        organization_id="org_1",
        attempt=1,
        base_model=BaseModelRef(id="bm", name="tiny", path=str(tiny_model)),
        training=file,
        validation=file,
        hyperparameters=recipe,
        **fields,
    )


@pytest.fixture(scope="module")
def published(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Made]]:
    """An adapter of random weights, published with a merged model and JSON rows held out."""
    work_dir = tmp_path_factory.mktemp("work")
    (work_dir / "train.jsonl").write_bytes(make_rows(20))
    (work_dir / "validation.jsonl").write_bytes(unlike(make_rows(12, seed=1)))
    spec = make_spec(tiny_model, exports=(MERGED_EXPORT,))
    _write_adapter(work_dir, tiny_model, spec)
    return work_dir, publish(work_dir, spec)


@pytest.fixture
def judged_spec(tiny_model: Path) -> RunSpec:
    return make_spec(tiny_model, evaluation=EvaluationPlan(grader=Grader(kind=GraderKind.JUDGE, model="demo")))


def _write_adapter(work_dir: Path, base: Path, spec: RunSpec) -> None:
    torch.manual_seed(3)
    recipe = spec.hyperparameters
    config = peft.LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        target_modules=list(recipe.target_modules),
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        use_dora=recipe.use_dora,
        use_rslora=recipe.use_rslora,
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), config)
    temporary = work_dir / "tmp-adapter"
    model.save_pretrained(temporary)
    (temporary / "README.md").unlink(missing_ok=True)
    (temporary / "adapter_config.json").write_text(json.dumps(adapter_config(spec)))
    seal_folder(
        temporary,
        work_dir / "adapter",
        lambda files: Manifest(kind="adapter", run_id="run_1", attempt=1, step=5, files=files),
    )


@pytest.mark.slow
def test_the_report_compares_both_models_on_the_held_out_rows(published):
    report = published[1][EVALUATION].report
    assert isinstance(report, EvaluationReport)

    names = [comparison.name for comparison in report.comparisons]

    assert (report.rows, report.answers, names) == (12, 12, ["loss", "token_accuracy", "exact_match"])
    for comparison in report.comparisons:
        for interval in (comparison.base, comparison.tuned, comparison.difference):
            assert interval.low <= interval.value <= interval.high
    assert report.worse_rows >= len(report.worse) > 0  # random weights
    worst = report.worse[0]
    assert worst.tuned_loss > worst.base_loss and worst.reference in worst.prompt


@contextmanager
def judging_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A gateway whose judge likes answers of the tuned model, asked second, better than those of the base."""
    bodies: list[dict[str, Any]] = []

    def answer(request: Request) -> Answer:
        body = json.loads(request.body)
        bodies.append(json.loads(body["messages"][1]["content"]))
        message = {"content": "4" if len(bodies) % 5 else "1"}
        usage = {"prompt_tokens": 10, "completion_tokens": 1}
        return Answer(content=json.dumps({"choices": [{"message": message}], "usage": usage}).encode())

    with serve_http(answer) as url:
        yield f"{url}/v1", bodies


def test_a_judge_grades_both_models_answers(published, judged_spec):
    with judging_server() as (url, bodies):
        judge = JudgeAccess(url=url, key="ann_web_x", model="demo")
        report = publish(published[0], judged_spec, judge=judge)[EVALUATION].report

    judged = report.comparisons[-1]
    assert (judged.name, judged.rows, len(bodies)) == ("judge", 12, 24)
    assert (report.judge, report.judge_calls, report.judge_input_tokens) == ("demo", 24, 240)
    assert 0 < judged.base.value < 1 and report.notes == ()
    assert all(body["question"] and body["reference_answer"] for body in bodies)


def test_without_a_judge_the_report_says_so_and_stands(published, judged_spec):
    report = publish(published[0], judged_spec, judge_refusal="Who created the job has left.")[EVALUATION].report

    assert [found.name for found in report.comparisons] == ["loss", "token_accuracy"]
    assert report.notes == ("There is no judge's score: Who created the job has left.",)


@pytest.mark.slow
def test_a_result_that_cannot_become_gguf_is_published_without_and_says_why(published, judged_spec):
    spec = msgspec.structs.replace(judged_spec, evaluation=None, exports=(GGUF_EXPORT,))

    result = publish(published[0], spec)[GGUF_EXPORT]

    assert result.sealed is None and result.is_lasting
    assert "converter" in result.problem or "llama.cpp" in result.problem


def test_the_probe_holds_what_peft_computes_for_the_exported_weights(published, tiny_model):
    work_dir, result = published
    folder = work_dir / result[EVALUATION].sealed.folder
    verify_folder(folder, manifest_sha256=result[EVALUATION].sealed.manifest_sha256)
    probe = msgspec.json.decode((folder / PARITY_FILE).read_bytes(), type=ParityProbe)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model = peft.PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).eval()

    first, last = probe.rows[0], probe.rows[-1]
    for row in (first, last):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.token_ids])).logits[0, :-1].float().log_softmax(-1)
            expected = logits.gather(1, torch.tensor(row.token_ids[1:])[:, None])[:, 0]
        difference = (expected - torch.tensor(row.tuned)).abs()
        assert difference.max() < 1e-6
        assert np.abs(np.array(row.tuned) - np.array(row.base)).mean() > 0.01
    assert len(last.token_ids) > len(first.token_ids)
    assert probe.chat is not None and probe.chat.messages[-1]["role"] == "user"


def test_the_adapter_loads_by_itself_with_equal_logits(published, tiny_model, tmp_path, monkeypatch):
    """AutoPeftModelForCausalLM finds the base by its name: here a folder of that name, elsewhere the hub."""
    work_dir, result = published
    os.symlink(tiny_model, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    prompt = torch.tensor([[3, 100, 200, 1, 4]])

    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(
        work_dir / result[EVALUATION].sealed.folder, dtype=torch.bfloat16
    )

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    trained = peft.PeftModel.from_pretrained(base, work_dir / "adapter")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(prompt).logits, trained.eval()(prompt).logits)


def test_the_merged_model_answers_as_base_and_adapter_do(published, tiny_model):
    work_dir, result = published
    merged = result[MERGED_EXPORT].sealed
    assert merged is not None
    folder = work_dir / merged.folder
    verify_folder(folder, manifest_sha256=merged.manifest_sha256)
    prompt = torch.tensor([[3, 100, 200, 1, 4]])

    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    exact = peft.PeftModel.from_pretrained(base, work_dir / "adapter").eval()
    with torch.no_grad():
        expected, found = exact(prompt).logits, merged.eval()(prompt).logits
        plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(prompt).logits
    assert (expected - found).abs().max() < 0.05 * (expected - plain).abs().max()
    assert {tensor.dtype for tensor in _tensors(folder).values()} == {torch.bfloat16}
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("flags", [{"use_dora": True}, {"use_rslora": True}])
def test_dora_and_rslora_merge_as_peft_applies_them(flags, published, tiny_model, tmp_path):
    spec = make_spec(tiny_model, recipe=msgspec.structs.replace(RECIPE, **flags))
    _write_adapter(tmp_path, tiny_model, spec)
    prompt = torch.tensor([[3, 100, 200, 1, 4]])

    merge_adapter(tiny_model, tmp_path / "adapter", tmp_path / "merged")

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        plain = base(prompt).logits
        expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(prompt).logits
        found = merged.eval()(prompt).logits
    assert (expected - found).abs().max() < 0.05 * (expected - plain).abs().max()


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def make_pairs(count: int) -> bytes:
    rows = [
        {
            "input": {"messages": [{"role": "user", "content": f"My car is red {number}"}]},
            "preferred_output": [{"role": "assistant", "content": "red"}],
            "non_preferred_output": [{"role": "assistant", "content": "blue"}],
        }
        for number in range(count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def make_texts(count: int) -> bytes:
    return "".join(json.dumps({"text": f"The card number {n} was taken twice."}) + "\n" for n in range(count)).encode()


@pytest.mark.parametrize(
    ("objective", "rows", "measures"),
    [
        (Objective.DPO, make_pairs(8), ["loss", "token_accuracy", "exact_match"]),
        (Objective.TEXT, make_texts(8), ["loss", "token_accuracy"]),
    ],
)
def test_preferences_and_running_text_are_compared_too(objective, rows, measures, tiny_model, tmp_path):
    (tmp_path / "train.jsonl").write_bytes(rows)
    (tmp_path / "validation.jsonl").write_bytes(unlike(rows))
    spec = make_spec(tiny_model, rows=8, recipe=msgspec.structs.replace(RECIPE, objective=objective))
    _write_adapter(tmp_path, tiny_model, spec)

    result = publish(tmp_path, spec)

    report = result[EVALUATION].report
    assert report is not None and report.rows == 8
    assert [found.name for found in report.comparisons] == measures
    probe = msgspec.json.decode((tmp_path / "published" / PARITY_FILE).read_bytes(), type=ParityProbe)
    assert probe.chat is None and len(probe.rows) == 7


def test_a_whole_model_is_compared_and_delivered_without_a_probe(tiny_model, tmp_path):
    (tmp_path / "train.jsonl").write_bytes(make_rows(8))
    (tmp_path / "validation.jsonl").write_bytes(unlike(make_rows(8, seed=1)))
    spec = make_spec(tiny_model, rows=8, recipe=msgspec.structs.replace(RECIPE, method=Method.FULL))
    torch.manual_seed(9)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model.model.layers[0].self_attn.q_proj.weight.data.normal_()
    model.save_pretrained(tmp_path / "tmp-model")
    seal_folder(
        tmp_path / "tmp-model",
        tmp_path / "adapter",
        lambda files: Manifest(kind="model", run_id="run_1", attempt=1, step=5, files=files),
    )

    result = publish(tmp_path, spec)

    report = result[EVALUATION].report
    assert report is not None
    assert report.comparisons[0].base.value != report.comparisons[0].tuned.value
    manifest = verify_folder(tmp_path / "published", manifest_sha256=result[EVALUATION].sealed.manifest_sha256)
    assert manifest.kind == "model" and PARITY_FILE not in {file.name for file in manifest.files}


def test_a_quantised_base_is_not_merged_into(tiny_model, published, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "quantised")
    tensors = _tensors(tiny_model)
    name = next(name for name in tensors if "q_proj" in name)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "quantised" / "model.safetensors")

    with pytest.raises(NotMergeable, match="16-bit"):
        merge_adapter(tmp_path / "quantised", published[0] / "adapter", tmp_path / "merged")
