"""Scoring: rules that never look at a value, a list that does not drift, figures that mean what they say."""

import json

import msgspec
import pytest

from apps.estimates import score
from apps.estimates.models.architectures import parameter_count
from apps.estimates.models.names import Names, gpu_key, plain_name
from apps.estimates.physics.gpus import GIB
from apps.estimates.published import rehearsals, sources
from apps.estimates.published.accuracy import Prediction, accuracy
from apps.estimates.published.predictions import memory_bytes, prepare, seconds_per_token
from apps.estimates.published.rows import Excluded, Job, framework, read_row, target_modules
from tests.bench.estimates.scored_rows import DATA, LIST, scored_rows
from tests.unit.estimates.published.rows import ROW


def test_the_committed_list_is_what_the_rules_say():
    listed = msgspec.json.decode(LIST.read_bytes())

    assert listed == scored_rows()
    assert sum(map(len, listed["scored peak_memory"].values())) >= 150


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quality": "C"}, "grade"),
        ({"method": "other-peft:ia3"}, "method"),
        ({"model": "nobody-9B"}, "shape"),
        ({"seq_len": None}, "sequence length"),
        ({"micro_batch": None}, "micro-batch"),
        ({"grad_ckpt": None}, "checkpointing"),
        ({"rank": None}, "rank"),
        ({"parallelism": "FSDP8 TP2", "gpu_count": 16}, "tensor"),
        ({"optimizer": "sgd"}, "AdamW"),
        ({"optimizer": "galore_adamw_8bit"}, "AdamW"),
        ({"metric": "loss"}, "neither"),
    ],
)
def test_rows_without_a_complete_configuration_are_left_out_with_the_reason(models, changes, reason):
    found = read_row(ROW | changes, models)

    assert isinstance(found, Excluded)
    assert reason in found.reason


def test_the_value_never_decides_whether_a_row_counts(models):
    assert all(isinstance(read_row(ROW | {"value": value}, models), Job) for value in (0.1, 20.0, 10_000.0))


@pytest.mark.parametrize(
    ("unit", "value"), [("GiB", GIB), ("GB = x/1e9", 1e9), ('"GB" = max_memory_reserved/1024^3', GIB), ("GB", 1e9)]
)
def test_a_unit_is_gib_only_where_the_row_says_so(models, unit, value):
    assert read_row(ROW | {"unit_note": unit, "value": 1.0}, models).measured == value


@pytest.mark.parametrize(
    ("notes", "stack"),
    [
        ("", "hf"),
        ("Liger kernel", "hf+liger"),
        ("Liger cross entropy", "hf+tiled"),
        ("liger_fused_linear_cross_entropy: true", "hf+tiled"),
        ("Liger FLCE", "hf+tiled"),
        ("Liger on, logits materialized", "hf+liger+whole"),
        ("no Liger kernel, plain cross-entropy", "hf"),
        ("axolotl, cut cross entropy", "axolotl+tiled"),
        ("unsloth", "unsloth"),
    ],
)
def test_a_row_names_its_framework_and_its_loss(notes, stack):
    assert framework(ROW | {"notes": notes}) == stack


def test_names_of_other_publishers_are_found():
    assert plain_name("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit") == plain_name("Llama-3.1-8B")
    assert plain_name("Llama3 8B") == plain_name("llama-3-8b")
    assert gpu_key(None, "NVIDIA H100 80GB HBM3") == "h100-sxm-80"
    assert gpu_key(None, "Tesla T4") == "t4-16"
    assert gpu_key(None, "something else") == ""


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-2-13b-chat-hf", 13.016), ("Llama 3.2 (3B)", 3.213), ("TheBloke/Mistral-7B-v0.1-GPTQ", 7.242),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7.248), ("mistralai/Mixtral-8x22B-v0.1", 140.621),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", 7.616), ("Qwen/Qwen3-4B-Instruct-2507", 4.022),
        ("Qwen/Qwen1.5-14B-Chat", 14.167), ("google/gemma-3-270m-it", 0.268), ("Phi3-mini (3.8B)", 3.821),
        ("microsoft/phi-1_5", 1.418), ("tiiuae/falcon-40b", 41.303), ("mosaicml/mpt-30b-instruct", 29.957),
        ("EleutherAI/pythia-1.4b-deduped", 1.415), ("facebook/opt-6.7b", 6.658), ("EleutherAI/gpt-j-6b", 6.051),
        ("GPT-NeoX 20B", 20.555), ("bigscience/bloomz-7b1", 7.069), ("stabilityai/stablelm-2-1_6b", 1.645),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", 0.362), ("01-ai/Yi-1.5-9B-Chat", 8.829),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32.764), ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.777),
        ("unsloth/DeepSeek-R1-Distill-Qwen-7B-bnb-4bit", 7.616), ("DeepSeek-R1-Distill-Qwen-14B", 14.770),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1.1), ("Llama-7B (huggyllama)", 6.738), ("THUDM/glm-4-9b-chat", 9.400),
        ("openai/gpt-oss-20b", 20.915), ("7B", None), ("nobody/nobody-9B", None), ("", None), (7, None),
    ],
)  # fmt: skip
def test_common_models_of_the_hub_have_their_own_shape(name, billions):
    names = Names(sources.load_known_architectures(DATA))

    assert (parameter_count(names[name]) / 1e9 if name in names else None) == pytest.approx(billions, abs=6e-4)


def test_the_dimensions_of_known_models_give_their_published_totals():
    names = sources.load_known_architectures(DATA)

    for row in msgspec.json.decode((DATA / "known_models.json").read_bytes())["models"]:
        if all(name not in sources.load_architectures(DATA) for name in row["names"]):
            assert parameter_count(names[row["names"][0]]) == row["params_computed"]
        assert row["params_computed"] == pytest.approx(row["params_published"], rel=4e-4)


def test_a_stated_framework_counts_more_than_the_page_it_is_on():
    row = ROW | {"source_url": "https://example.org/unsloth/liger.csv"}

    assert framework(row) == "unsloth"
    assert framework(row | {"framework": "transformers, TRL"}) == "hf"
    assert framework(row | {"framework": "something else"}) == "hf"
    assert framework(row | {"framework": "LitGPT", "notes": "liger"}) == "litgpt+tiled"


@pytest.mark.parametrize(
    ("changes", "stack"),
    [
        ({"published": "2024-12"}, "hf+before-4.49"),
        ({"published": "2025-03-01"}, "hf"),
        ({"published": "2024-12", "notes": "Liger kernel"}, "hf+liger"),
        ({"framework": "PyTorch loop, transformers, PEFT"}, "loop"),
        ({"framework": "PyTorch loop with its own loss"}, "plain_loop"),
        ({"method": "full", "gpu_count": 4, "parallelism": "FSDP full_shard"}, "hf+mixed"),
        ({"method": "full", "gpu_count": 4, "parallelism": "FSDP", "precision": "pure bf16"}, "hf"),
        ({"method": "full", "gpu_count": 4, "parallelism": "FSDP", "notes": "Liger kernel"}, "hf+mixed+liger"),
    ],
)
def test_a_row_names_its_loop_and_what_holds_its_weights(changes, stack):
    assert framework(ROW | changes) == stack


def test_litgpt_gathers_all_weights_to_load_a_sharded_model(models, gpu_types):
    row = ROW | {
        "method": "lora",
        "framework": "LitGPT",
        "parallelism": "FSDP",
        "seq_len": 128,
        "unit_note": "allocated",
    }
    found = prepare(read_row(row | {"gpu_count": 8}, models), gpu_types)
    other = prepare(read_row(row | {"gpu_count": 8, "framework": "torchtune"}, models), gpu_types)

    assert memory_bytes(found) == found.shape.total * 2 * (1 + 1 / 8)
    assert memory_bytes(other) < 0.5 * memory_bytes(found)


def test_a_model_with_one_matrix_for_query_key_and_value_adapts_it(models):
    pythia = Names(sources.load_known_architectures(DATA))["pythia-2.8b"]

    assert target_modules(ROW | {"targets": "query, value"}, pythia) == ("query_key_value",)


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        ("q_proj, v_proj", ("q_proj", "v_proj")), ("q,v", ("q_proj", "v_proj")), ("q|k|v|o (attn only)", "qkvo"),
        ("query_key_value", ("q_proj", "k_proj", "v_proj")), ("linear_qkv, linear_proj", "qkvo"),
        ("wq, wv and trainable wte & lm_head", ("q_proj", "v_proj")), ("all", "all-linear"), ("?", "all-linear"),
        ("attn + mlp (all linear)", "all-linear"), ("all attention layers", "qkvo"),
        ("q,v,o + mlp", ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ],
)  # fmt: skip
def test_other_frameworks_names_of_modules_are_known(models, targets, modules):
    wanted = {"qkvo": ("q_proj", "k_proj", "v_proj", "o_proj"), "all-linear": ("all-linear",)}.get(modules, modules)

    assert target_modules(ROW | {"targets": targets}, models["Llama-3.1-8B"]) == wanted


@pytest.mark.parametrize(
    ("parallelism", "is_offloaded"),
    [
        ("ds_zero2_no_offload", False), ("ZeRO-3, no CPU offload", False), ("offload_optimizer.device=none", False),
        ("ZeRO-3, CPU offload off", False), ("DeepSpeed ZeRO-3, no offload", False),
        ("ZeRO-3 without offloading", False), ("ZeRO-3 offload: none", False),
        ("FSDP full shard + CPU offload", True), ("ZeRO-3, offload_optimizer: cpu", True),
    ],
)  # fmt: skip
def test_no_offload_is_no_offload(models, parallelism, is_offloaded):
    found = read_row(ROW | {"parallelism": parallelism, "gpu_count": 2}, models)

    assert found.plan.cpu_offload == is_offloaded


def test_lengths_vary_only_if_the_row_says_so(models):
    def is_even(notes):
        return read_row(ROW | {"packing": None, "notes": notes}, models).plan.is_packed

    assert is_even("TRL 0.9") and is_even("1,024 samples, right-padded to 2048")
    assert not any(map(is_even, ("Alpaca; cap 2048", "unpadded samples", "seq_len is the longest sample")))


def test_ligers_kernels_keep_less_of_norms_and_gated_activations(models, gpu_types):
    def peak(notes):
        row = ROW | {"method": "full", "grad_ckpt": False, "micro_batch": 8, "model": "Qwen2.5-0.5B", "notes": notes}
        return memory_bytes(prepare(read_row(row, models), gpu_types))

    assert peak("Liger kernel") < 0.8 * peak("cut cross entropy")


def test_a_fused_or_8_bit_optimizer_makes_no_copy_of_its_state(models, gpu_types):
    def peak(optimizer):
        row = ROW | {"method": "full", "model": "Qwen2.5-0.5B", "optimizer": optimizer, "seq_len": 128}
        return memory_bytes(prepare(read_row(row, models), gpu_types))

    assert peak("adamw") > 1.05 * peak("adamw_torch_fused") > 1.05 * peak("adamw_8bit")


def test_a_loss_in_the_heads_type_is_twice_as_large_over_4_bits(models, gpu_types):
    def peak(method, framework):
        row = ROW | {"method": method, "framework": framework, "model": "Qwen2.5-0.5B", "micro_batch": 16}
        return memory_bytes(prepare(read_row(row, models), gpu_types))

    assert peak("qlora", "own loss") > 1.5 * peak("lora", "own loss")
    assert peak("lora", "own loop") > 1.5 * peak("lora", "own loss")


def test_accuracy_counts_a_false_fit_only_where_the_verdict_was_that_it_fits():
    point = Prediction(id="a", source="s", method="lora", gpu="g", predicted=9.0, measured=10.0, p10=8.0, p90=9.6)

    found = accuracy([point], cards=[4, 9, 10, 14, 20])

    assert (found.n, found.median_ape, found.bias) == (1, 0.1, -0.1)
    assert found.false_fits_p50 == pytest.approx(1 / 3, abs=1e-4)  # 9, 10 and 14 are within half; 9 fits 9.0 only
    assert found.false_fits == 0.0
    assert found.coverage_p10_p90 == 0.0


def test_the_command_ends_with_one_json_object_of_both_kinds(tmp_path, capsys):
    rows = [
        ROW,
        ROW | {"id": "x-2", "metric": "tokens_per_s_per_gpu", "value": 8000.0},
        ROW | {"rank": None},
        {"id": 1},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))

    assert score.main([str(path)]) == 0

    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    wanted = {"n", "median_ape", "mape", "p90_ape", "share_5", "share_10", "share_15", "bias", "false_fits"}
    for kind in ("peak_memory", "time"):
        assert wanted | {"coverage_p10_p90"} <= set(found[kind])
        assert found[kind]["n"] == 1
        assert found[kind]["median_ape"] < 0.5


@pytest.mark.parametrize(("value", "tokens_per_second"), [(800.0, 800.0), (3497.0, 3497 / 8)])
def test_a_rate_above_what_one_gpu_can_compute_is_that_of_all(models, gpu_types, value, tokens_per_second):
    """A 70B model at 3,497 tokens/s needs three times the rate of an A100."""
    sharded = {"model": "Llama-3.1-70B", "method": "lora", "gpu_key": "a100-80", "gpu_count": 8, "parallelism": "FSDP"}
    rate = {"metric": "tokens_per_s_per_gpu", "unit_note": "tokens/s", "value": value}

    found = prepare(read_row(ROW | sharded | rate, models), gpu_types)

    assert 1 / found.job.measured == pytest.approx(tokens_per_second)


@pytest.mark.parametrize(("notes", "counter"), [("", "device"), ("torchtune", "allocated")])
def test_a_figure_without_a_counters_name_has_its_frameworks(models, notes, counter):
    assert read_row(ROW | {"notes": notes}, models).counter == counter
    assert read_row(ROW | {"notes": notes, "unit_note": "GiB reserved"}, models).counter == "reserved"


def test_torchtune_shards_the_embedding_of_large_models_apart_and_sends_gradients_in_16_bits(models, gpu_types):
    offloaded = {"parallelism": "FSDP2", "gpu_count": 8, "optimizer": "AdamW fused, CPU offload", "method": "full"}
    row = ROW | {"notes": "torchtune; torch compile enabled", "gpu_key": "a100-80"} | offloaded

    large = prepare(read_row(row | {"model": "Llama-3.1-70B"}, models), gpu_types)
    small = read_row(row | {"model": "Llama-3.1-8B"}, models)

    assert large.job.plan.splits_root and not small.plan.splits_root
    assert memory_bytes(large) < 14.93e9 * 1.2  # as torchtune's README measured
    whole = msgspec.structs.replace(large.job.plan, splits_root=False)
    kept = msgspec.structs.replace(large, job=msgspec.structs.replace(large.job, plan=whole))
    assert memory_bytes(kept) > memory_bytes(large) + 4 * large.shape.head  # gathered, and its gradient


def test_rows_that_are_not_traced_are_counted_with_their_reason(tmp_path, capsys, monkeypatch):
    asked = []

    def answer(requests):
        asked.extend(requests)
        return [{"allocated_bytes": 10 * GIB}, {"error": "ValueError: no such model"}]

    monkeypatch.setattr(rehearsals, "PYTHON", rehearsals.ROOT / "manage.py")  # a file that exists
    monkeypatch.setattr(rehearsals, "_ask", answer)
    axolotl = {"notes": "axolotl"}
    changes = [{}, axolotl, axolotl, {"notes": "Unsloth"}, {"model": "Qwen-7B"}, {"metric": "seconds_per_iter"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(ROW | each | {"id": f"x-{n}"}) for n, each in enumerate(changes)))

    assert score.main([str(path), "--rehearse"]) == 0

    *lines, last = capsys.readouterr().out.splitlines()
    told = lines[lines.index("1 of 5 rows of peak_memory rehearsed; the others keep the formula:") + 1 :]
    assert {line.split(maxsplit=1)[1]: int(line.split()[0]) for line in told} == {
        "the trace failed: ValueError: no such model": 1,
        "the trace failed: the process ended": 1,
        "the code of Unsloth is not installed": 1,
        "the model's code is its publisher's, not that of transformers": 1,
    }
    found = json.loads(last)
    assert (found["peak_memory"]["n"], found["peak_memory"]["rehearsed"]) == (5, 1)
    assert "rehearsed" not in found["time"]
    assert [request.stack for request in asked] == ["hf", "axolotl", "axolotl"]


@pytest.mark.parametrize(("length", "tokens_per_second"), [(4096, 3413), (32_768, 2456), (65_536, 1820)])
def test_long_rows_take_the_time_of_flash_attention_2(models, gpu_types, length, tokens_per_second):
    """LLaMA-Factory's wiki, "Performance comparison": Llama 2 7B in 4 bits on an A100 of 40 GB."""
    row = ROW | {"model": "Llama2-7B", "rank": 8, "seq_len": length, "micro_batch": 1, "grad_accum": 4}
    row |= {"metric": "tokens_per_s_per_gpu", "value": 1.0, "notes": "unsloth", "gpu_key": "a100-40"}

    seconds = seconds_per_token(prepare(read_row(row, Names(models)), gpu_types))

    assert seconds == pytest.approx(1 / tokens_per_second, rel=0.25)
