"""Rows in other spellings are scored as they are meant, or left out with a reason; none ends the program."""

import json

import pytest

from apps.estimates import score
from apps.estimates.physics.gpus import GIB
from apps.estimates.published.accuracy import Prediction
from tests.unit.estimates.published.rows import ROW


def scored(row: dict[str, object]) -> Prediction | str:
    """Return the row's prediction, or the reason why it has none."""
    found = score.score([row])
    points = [point for kind in found.points.values() for point in kind]
    return points[0] if points else found.excluded[0].reason


def predicted(changes: dict[str, object]) -> float:
    found = scored(ROW | changes)
    assert isinstance(found, Prediction), found
    return found.predicted


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        ({"method": "qlora-4bit"}, {"method": "qlora"}),
        ({"method": "QLoRA (4-bit NF4)"}, {"method": "qlora"}),
        ({"method": "QLoRA"}, {"method": "qlora"}),
        ({"method": "QDoRA"}, {"method": "qlora", "notes": "-dora"}),
        ({"method": "LoRA_4bit"}, {"method": "qlora"}),
        ({"method": "LoRA-SFT"}, {"method": "lora"}),
        ({"method": "sft", "precision": "bnb 4bit"}, {"method": "qlora"}),
        ({"method": "sft"}, {"method": "lora"}),
        ({"method": "full-ft", "rank": None}, {"method": "full"}),
        ({"method": "FFT", "rank": None}, {"method": "full"}),
        ({"method": "full_finetune", "rank": None}, {"method": "full"}),
        ({"seq_len": "2,048"}, {}),
        ({"seq_len": "2k"}, {}),
        ({"seq_len": None, "max_seq_length": 2048}, {}),
        ({"micro_batch": None, "per_device_train_batch_size": "2"}, {}),
        ({"rank": "r=16"}, {}),
        ({"grad_ckpt": "on"}, {}),
        ({"grad_ckpt": None, "gradient_checkpointing": "True"}, {}),
        ({"targets": ["q_proj", "v_proj"]}, {"targets": "q_proj,v_proj"}),
        ({"gpu": "1x H100 80GB", "gpu_count": None}, {}),
        ({"gpu_key": "RTX4090"}, {"gpu_key": "rtx-4090"}),
        ({"gpu_key": "A100-40GB"}, {"gpu_key": "a100-sxm-40"}),
        ({"model": "meta-llama/Meta-Llama-3.1-8B-Instruct"}, {}),
        ({"framework": "a framework of tomorrow"}, {}),
        ({"quality": None}, {}),
    ],
)
def test_another_spelling_is_predicted_as_the_usual_one(spelled, meant):
    assert predicted(spelled) == predicted(meant)


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({"value": "40GB", "unit_note": None}, 40e9),
        ({"value": "40 GiB", "unit_note": None}, 40 * GIB),
        ({"value": "41,000 MB", "unit_note": None}, 41e9),
        ({"value": "40960MiB", "unit_note": None}, 40 * GIB),
        ({"value": 40, "metric": "peak_memory_gib", "unit_note": None}, 40 * GIB),
        ({"value": 40960, "metric": "max_memory_reserved_mib", "unit_note": None}, 40 * GIB),
        ({"value": 40, "metric": "peak memory", "unit_note": "GB"}, 40e9),
        ({"value": 8192, "metric": "tokens_per_second", "gpu_count": 2, "parallelism": "ddp"}, 1 / 4096),
        ({"value": 2, "metric": "samples_per_second"}, 1 / 4096),
        ({"value": 0.5, "metric": "steps/s", "grad_accum": 1}, 2 / 4096),
        ({"value": 2048, "metric": "tokens/s/GPU"}, 1 / 2048),
        ({"value": "2000 ms", "metric": "s/it", "grad_accum": "1"}, 2 / 4096),
        ({"value": "2 s/it", "metric": "s/it", "grad_accum": "1"}, 2 / 4096),
    ],
)
def test_a_value_has_the_unit_that_it_or_its_metric_names(changes, measured):
    found = scored(ROW | changes)

    assert isinstance(found, Prediction), found
    assert found.measured == pytest.approx(measured)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "KTO"}, "KTO"),
        ({"method": "lora-grpo"}, "GRPO"),
        ({"method": "dpo", "rank": None}, "does not state"),
        ({"method": "sft", "rank": None}, "does not state"),
        ({"method": "dpo-lora", "metric": "seconds_per_iter"}, "preference"),
        ({"method": None}, "method"),
        ({"method": "galore"}, "method"),
        ({"precision": "fp32", "metric": "tokens_per_s_per_gpu"}, "fp32"),
        ({"micro_batch": None}, "micro-batch"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"micro_batch": 1e300}, "micro_batch"),
        ({"micro_batch": "1-4"}, "micro_batch"),
        ({"seq_len": "long"}, "seq_len"),
        ({"seq_len": [1, 2]}, "seq_len"),
        ({"value": "15-16 GB"}, "value"),
        ({"value": None}, "value"),
        ({"value": float("nan")}, "value"),
        ({"value": -1}, "positive"),
        ({"model": "7B"}, "shape"),
        ({"model": None}, "shape"),
        ({"model": 7}, "shape"),
        ({"metric": None}, "neither"),
        ({"gpu": None, "metric": "tokens_per_s_per_gpu"}, "speed"),
    ],
)
def test_a_row_that_cannot_be_compared_is_left_out_with_the_reason(changes, reason):
    found = scored(ROW | changes)

    assert isinstance(found, str), found
    assert reason in found


def test_preferences_hold_two_answers_and_only_dpo_a_reference():
    lora, dpo, orpo = (
        predicted({"method": method, "rank": 16, "model": "Qwen2.5-0.5B"})
        for method in ("lora", "lora-dpo", "orpo-lora")
    )

    assert dpo >= orpo > 1.5 * lora


@pytest.mark.parametrize("field", sorted(ROW))
@pytest.mark.parametrize("value", [None, "", "unknown", -3, 0, 1e30, True, [], {}, "2 or 4", "∞", ["a", 1]])
def test_no_field_ends_the_program(field, value):
    found = score.score([ROW | {field: value}, {key: each for key, each in ROW.items() if key != field}])

    assert sum(map(len, found.points.values())) + len(found.excluded) == 2


def test_lines_that_are_no_rows_are_left_out(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": broken\n[1]\n"text"\n\xff\n' + json.dumps(ROW).encode())

    assert score.main([str(path)]) == 0

    out = capsys.readouterr().out
    assert "4  unreadable: the row is not a JSON object" in out
    assert json.loads(out.splitlines()[-1])["peak_memory"]["n"] == 1


def test_a_file_may_be_one_list_and_must_be_json(tmp_path, capsys):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROW]))
    assert score.main([str(path)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["peak_memory"]["n"] == 1

    path.write_text("model,value\n1,2\n")
    assert score.main([str(path)]) == 2
    assert "rows.json" in capsys.readouterr().err
