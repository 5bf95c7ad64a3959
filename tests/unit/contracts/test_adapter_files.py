"""What may be an adapter: headers byte by byte, names and shapes against the base model's own table."""

import json
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from apps.contracts.adapter_files import (
    ALL_LINEAR,
    MAX_HEADER_BYTES,
    AdapterFileError,
    ProblemCode,
    SafetensorsHeader,
    Tensor,
    UnsupportedArchitecture,
    base_reference,
    check_adapter,
    clean_adapter_config,
    expected_tensors,
    parse_config,
    parse_header,
)

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": list(ALL_LINEAR),
    "bias": "none",
    "use_dora": False,
    "rank_pattern": {},
    "base_model_name_or_path": "/home/somebody/model",
}
PREFIX = "base_model.model.model.layers."


def make_file(entries: dict[str, Any], *, data_bytes: int) -> tuple[bytes, int]:
    """Return the header's bytes and the size of the whole file."""
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header, 8 + len(header) + data_bytes


def make_entry(begin: int, end: int, *, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def make_header(**replace: Tensor | None) -> SafetensorsHeader:
    table = expected_tensors(BASE, rank=8, target_modules=ALL_LINEAR)
    tensors = {name: Tensor(dtype="BF16", shape=shape, begin=0, end=0) for name, shape in table.items()}
    for name, tensor in replace.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    return SafetensorsHeader(tensors=tensors)


def codes_of(header: SafetensorsHeader, config: dict[str, Any]) -> set[ProblemCode]:
    return {problem.code for problem in check_adapter(header, config, BASE)}


def test_tensors_are_read_with_their_place_in_the_file() -> None:
    start, size = make_file(
        {"b": make_entry(8, 24), "a": make_entry(0, 8), "__metadata__": {"format": "pt"}}, data_bytes=24
    )

    header = parse_header(start, file_bytes=size)

    assert header.metadata == {"format": "pt"}
    assert header.tensors["b"] == Tensor(dtype="F32", shape=(4,), begin=len(start) + 8, end=len(start) + 24)


@pytest.mark.parametrize(
    ("entries", "data_bytes"),
    [
        ({"a": make_entry(0, 8), "b": make_entry(12, 16)}, 16),  # hole
        ({"a": make_entry(0, 8), "b": make_entry(4, 12)}, 12),  # overlap
        ({"a": make_entry(4, 8)}, 8),  # begins late
        ({"a": make_entry(0, 8)}, 16),  # bytes after the last tensor
        ({"a": make_entry(0, 8)}, 4),  # truncated
        ({"a": make_entry(0, 8, shape=[3])}, 8),  # size is not the shape's
        ({"a": make_entry(0, 8, shape=[-2])}, 8),
        ({"a": make_entry(0, 8, shape=[True, 2])}, 8),
        ({"a": make_entry(0, 8, dtype="F12")}, 8),
        ({"a": make_entry(0, 8, dtype=[])}, 8),
        ({"a" * 50_000: make_entry(0, 8, dtype="F" * 50_000)}, 8),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8),
        ({"a": make_entry(0, 8) | {"more": 1}}, 8),
        ({"a": [1, 2]}, 8),
        ({"__metadata__": {"x": 1}}, 0),
    ],
)
def test_file_with_a_wrong_layout_is_refused(entries: dict[str, Any], data_bytes: int) -> None:
    start, size = make_file(entries, data_bytes=data_bytes)

    with pytest.raises(AdapterFileError) as refused:
        parse_header(start, file_bytes=size)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\x02\x00\x00",
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        (2**63).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b'{"\xff"',
        (16).to_bytes(8, "little") + b'{"a":{},"a":{}  ',
        (60_000).to_bytes(8, "little") + b'{"a":' * 12_000,
    ],
)
def test_bytes_that_are_no_header_are_refused(start: bytes) -> None:
    with pytest.raises(AdapterFileError):
        parse_header(start, file_bytes=max(len(start), 200_000))


@pytest.mark.parametrize("data", [b"", b"[]", b'{"r": NaN}', b'{"r": 1, "r": 2}', b" " * 70_000])
def test_configuration_that_is_no_plain_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(AdapterFileError):
        parse_config(data)


def test_table_has_two_tensors_for_each_layer_and_module_in_their_shapes() -> None:
    table = expected_tensors(BASE, rank=8, target_modules=ALL_LINEAR)

    assert len(table) == 3 * 7 * 2
    assert table[PREFIX + "0.self_attn.q_proj.lora_A.weight"] == (8, 64)
    assert table[PREFIX + "1.self_attn.k_proj.lora_B.weight"] == (32, 8)
    assert table[PREFIX + "2.mlp.down_proj.lora_A.weight"] == (8, 160)
    assert table[PREFIX + "2.mlp.down_proj.lora_B.weight"] == (64, 8)


def test_head_size_of_the_configuration_wins_over_the_quotient() -> None:
    table = expected_tensors(BASE | {"head_dim": 32}, rank=4, target_modules=("q_proj", "o_proj"))

    assert table[PREFIX + "0.self_attn.q_proj.lora_B.weight"] == (128, 4)
    assert table[PREFIX + "0.self_attn.o_proj.lora_A.weight"] == (4, 128)


def test_no_table_is_guessed_for_other_architectures() -> None:
    with pytest.raises(UnsupportedArchitecture):
        expected_tensors(BASE | {"architectures": ["FalconForCausalLM"]}, rank=8, target_modules=ALL_LINEAR)


def test_a_mixture_of_experts_has_adapters_of_its_attention_only() -> None:
    mixture = BASE | {"architectures": ["MixtralForCausalLM"]}

    assert set(expected_tensors(mixture, rank=8, target_modules=("q_proj",))) < set(
        expected_tensors(BASE, rank=8, target_modules=("q_proj", "down_proj"))
    )
    with pytest.raises(UnsupportedArchitecture, match="no down_proj"):
        expected_tensors(mixture, rank=8, target_modules=("q_proj", "down_proj"))


def test_layers_that_are_fused_have_the_shapes_of_all_their_parts() -> None:
    phi = BASE | {"architectures": ["Phi3ForCausalLM"]}

    table = expected_tensors(phi, rank=8, target_modules=("qkv_proj", "gate_up_proj"))

    parts = expected_tensors(BASE, rank=8, target_modules=ALL_LINEAR)
    sizes = {module: parts[f"{PREFIX}0.{module}.lora_B.weight"][0] for module in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj",
    )}  # fmt: skip
    assert table[PREFIX + "0.self_attn.qkv_proj.lora_B.weight"] == (sum(list(sizes.values())[:3]), 8)
    assert table[PREFIX + "0.mlp.gate_up_proj.lora_B.weight"] == (sum(list(sizes.values())[3:]), 8)


def test_plain_lora_on_its_base_has_no_problem() -> None:
    assert check_adapter(make_header(), CONFIG, BASE) == []


Q_PROJ = PREFIX + "0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({Q_PROJ: None}, ProblemCode.MISSING_TENSOR),
        ({PREFIX + "9.mlp.up_proj.lora_A.weight": Tensor("BF16", (8, 64), 0, 0)}, ProblemCode.UNEXPECTED_TENSOR),
        ({"base_model.model.lm_head.weight": Tensor("BF16", (8, 64), 0, 0)}, ProblemCode.UNEXPECTED_TENSOR),
        ({Q_PROJ: Tensor("BF16", (8, 32), 0, 0)}, ProblemCode.WRONG_SHAPE),
        ({Q_PROJ: Tensor("BF16", (4, 64), 0, 0)}, ProblemCode.WRONG_SHAPE),
        ({Q_PROJ: Tensor("I8", (8, 64), 0, 0)}, ProblemCode.WRONG_DTYPE),
    ],
)
def test_tensors_other_than_the_table_are_named(change: dict[str, Tensor | None], code: ProblemCode) -> None:
    assert codes_of(make_header(**change), CONFIG) == {code}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"r": 16}, ProblemCode.WRONG_SHAPE),
        ({"r": 0}, ProblemCode.INVALID_VALUE),
        ({"r": 8.0}, ProblemCode.INVALID_VALUE),
        ({"r": True}, ProblemCode.INVALID_VALUE),
        ({"lora_alpha": 1e9}, ProblemCode.INVALID_VALUE),
        ({"lora_alpha": -1}, ProblemCode.INVALID_VALUE),
        ({"lora_alpha": "16"}, ProblemCode.INVALID_VALUE),
        ({"target_modules": "all-linear"}, ProblemCode.INVALID_VALUE),
        ({"target_modules": ["lm_head"]}, ProblemCode.INVALID_VALUE),
        ({"target_modules": []}, ProblemCode.INVALID_VALUE),
        ({"target_modules": ["q_proj"]}, ProblemCode.UNEXPECTED_TENSOR),
        ({"peft_type": "LOKR"}, ProblemCode.UNSUPPORTED_FEATURE),
        ({"peft_type": None}, ProblemCode.UNSUPPORTED_FEATURE),
        ({"bias": "all"}, ProblemCode.UNSUPPORTED_FEATURE),
        ({"use_dora": True}, ProblemCode.UNSUPPORTED_FEATURE),
        ({"use_rslora": "yes"}, ProblemCode.INVALID_VALUE),
        ({"modules_to_save": ["lm_head"]}, ProblemCode.UNSUPPORTED_FEATURE),
        ({"rank_pattern": {"q_proj": 4}}, ProblemCode.UNSUPPORTED_FEATURE),
        ({"layer_replication": [[0, 2]]}, ProblemCode.UNSUPPORTED_FEATURE),
        ({"something_new": None}, ProblemCode.UNKNOWN_KEY),
    ],
)
def test_configuration_of_anything_but_plain_lora_is_refused(change: dict[str, Any], code: ProblemCode) -> None:
    assert codes_of(make_header(), CONFIG | change) == {code}


def test_served_configuration_takes_over_numbers_and_nothing_else() -> None:
    clean = clean_adapter_config(CONFIG | {"lora_dropout": 0.1, "revision": "x"}, base_model="b-1")

    assert (clean["r"], clean["lora_alpha"], clean["target_modules"]) == (8, 16, sorted(ALL_LINEAR))
    assert clean["base_model_name_or_path"] == "b-1"
    assert "revision" not in clean
    assert clean["lora_dropout"] == 0.0


def test_a_base_model_without_a_repository_is_named_by_no_hub_id() -> None:
    assert base_reference(repo="meta-llama/Llama-3.1-8B", name="llama-3.1-8b") == "meta-llama/Llama-3.1-8B"
    with pytest.raises(HFValidationError):
        validate_repo_id(base_reference(repo=None, name="anneal-demo"))
