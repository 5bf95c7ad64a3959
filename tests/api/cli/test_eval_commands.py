"""`anneal evals`: criteria, runs with their pass rates, and the price of those that ask a model."""

import json
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest
from anneal import watching

from apps.batches.models import BatchFile
from apps.serving.evals.models import Eval, EvalRun
from apps.serving.evals.progress import prepare

ITEMS = [
    {"item": {"question": "part", "answer": "Bye."}, "sample": {"output_text": "Bye."}},
    {"item": {"question": "greet", "answer": "Hi."}, "sample": {"output_text": "Bye."}},
]


@pytest.fixture
def items(tmp_path: Path) -> Path:
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(map(json.dumps, ITEMS)), encoding="utf-8-sig")  # as an editor of Windows saves it
    return path


@pytest.mark.slow
def test_answers_in_a_file_are_graded_at_no_cost_and_shown_as_pass_rates(
    anneal, floor, items, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=lambda seconds: prepare(EvalRun.objects.get().pk)))
    made = anneal("evals", "create", "sums", "--check", "eq={{item.answer}}", "--check", "like=ye", "--json").json
    run = anneal("evals", "run", made["id"], "--file", str(items), "--wait", "--json")
    shown, one = anneal("evals", "show", made["id"]), anneal("evals", "show", made["id"], run.json["id"])
    failed = anneal("evals", "items", made["id"], run.json["id"], "--status", "fail", "--json")
    graded = anneal("evals", "items", made["id"], run.json["id"])
    body = tmp_path / "run.json"
    body.write_text(
        json.dumps({"data_source": {"type": "jsonl", "source": {"type": "file_content", "content": ITEMS}}})
    )
    inline = anneal("evals", "run", made["id"], "--body", str(body), "--metadata", "team=core", "--json")

    assert run.exit_code == 0 and run.json["status"] == "completed", run.errors
    assert "1 of 2 (50.0 %)" in shown.output and "eq {{item.answer}} (string_check)" in shown.output
    rates = [line.rpartition("  ")[2] for line in one.output.splitlines() if line.startswith("Passed")]
    assert rates == ["1 of 2 (50.0 %)", "1 of 2 (50.0 %)", "2 of 2 (100.0 %)"]
    assert [each["datasource_item"] for each in failed.json["data"]] == [ITEMS[1]["item"]]
    assert "eq {{item.answer}}" in graded.output and graded.output.count("Bye.") == 2
    assert anneal("evals", "items", made["id"], run.json["id"], "--status", "odd").exit_code == 5
    assert inline.json["metadata"] == {"team": "core"}, inline.errors
    assert len(anneal("evals", "show", made["id"], "--json").json["runs"]) == 2
    assert made["id"] in anneal("evals", "list").output


@pytest.mark.slow
def test_an_eval_whose_answer_is_too_long_to_be_kept_is_created_once(anneal, network, floor, tmp_path) -> None:
    template = [{"role": "user", "content": "x" * 8_000}]
    criteria = [
        {"type": "label_model", "name": f"c{number}", "model": "anneal-demo", "input": template}
        | {"labels": ["good", "bad"], "passing_labels": ["good"]}
        for number in range(10)
    ]
    body = tmp_path / "eval.json"
    body.write_text(json.dumps({"testing_criteria": criteria}))
    made = anneal("evals", "create", "long", "--body", str(body), "--json")

    items = [{"item": {"text": "x" * 8_000}}] * 10
    source = {
        "type": "completions",
        "model": "anneal-demo",
        "input_messages": {"type": "template", "template": template},
    }
    body.write_text(json.dumps({"data_source": source | {"source": {"type": "file_content", "content": items}}}))
    run = anneal("evals", "run", made.json["id"], "--body", str(body), "--yes", "--json")

    assert (made.exit_code, run.exit_code) == (0, 0), run.errors
    assert (Eval.objects.count(), EvalRun.objects.count()) == (1, 1)
    keyed = ["Idempotency-Key" in call.headers for call in network.calls if call.method == "POST"]
    assert keyed == [True, False, True, False]


@pytest.mark.slow
def test_a_run_that_asks_a_model_starts_once_its_limit_is_accepted(anneal, floor, items) -> None:
    words = ("evals", "create", "pairs", "--baseline", "anneal-demo", "--judge", "anneal-demo", "--json")
    made = anneal(*words).json["id"]
    asked = ("evals", "run", made, "--model", "anneal-demo")
    question = ("--prompt", "{{item.question}}", "--system", "Be brief.", "--max-tokens", "16")
    declined = anneal(*asked, *question, "--file", str(items), "--max-cost", "0.50", answer="n\n")
    files = BatchFile.objects.count()
    run = anneal(*asked, *question, "--file", str(items), "--max-cost", "$0.50", "--yes", "--json").json
    file_id = run["data_source"]["source"]["id"]
    dataset = anneal(*asked, "--file", file_id, "--json", answer="y\n")
    canceled = anneal("evals", "cancel", made, run["id"])

    assert (declined.exit_code, files) == (1, 0) and "At most $0.50. Start? [y/N]" in declined.errors
    assert Decimal(run["max_cost_usd"]) == Decimal("0.5")
    assert run["data_source"] == {
        "type": "completions", "model": "anneal-demo", "sampling_params": {"max_completion_tokens": 16},
        "source": {"type": "file_id", "id": file_id},
        "input_messages": {"type": "template", "template": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{item.question}}"},
        ]},
    }  # fmt: skip
    source = json.loads(dataset.output.removeprefix(" y\n"))["data_source"]  # the runner echoes the answer
    assert source["input_messages"]["item_reference"] == "item.input"
    assert "No price is known. Start without --max-cost?" in dataset.errors
    assert canceled.exit_code == 0 and "canceled" in canceled.output


def test_wrong_words_are_refused_before_anything_is_sent(anneal, network, items) -> None:
    run = ("evals", "run", "eval_1", "--model", "anneal-demo")
    wrong = [
        anneal("evals", "create", "sums", key="k"),
        anneal("evals", "create", "sums", "--judge", "anneal-demo", key="k"),
        anneal("evals", "create", "sums", "--check", "eq", key="k"),
        anneal(*run, key="k"),
        anneal(*run, "--file", "nothing.jsonl", key="k"),
        anneal(*run, "--file", str(items), "--system", "Be brief.", key="k"),
        anneal(*run, "--file", str(items), "--max-cost", "much", key="k"),
    ]

    assert [each.exit_code for each in wrong] == [2] * 7 and network.calls == []
