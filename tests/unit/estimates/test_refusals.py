"""A question that makes no sense is refused by the name of its field, never answered with a number."""

import msgspec
import pytest

from apps.estimates.errors import EstimateError
from apps.estimates.models.architectures import from_config
from apps.estimates.physics import gpus
from apps.estimates.quote import quote
from tests.unit.estimates.pools import pool


def test_rows_longer_than_the_model_reads_are_refused_with_its_limit(ask):
    estimate = quote(request=ask(max_length=16_384, longest_row_tokens=16_384), pool=pool(None))

    assert not estimate.fits
    assert "8,192" in estimate.reason
    assert estimate.fixes[0].max_length == 8192


@pytest.mark.parametrize("field", ["rows", "tokens", "trained_tokens", "epochs", "batch_size", "max_length"])
@pytest.mark.parametrize("value", [0, -1, 10**17])
def test_an_empty_or_absurd_request_is_refused_by_its_field(ask, field, value):
    with pytest.raises(EstimateError, match=field) as refused:
        ask(**{field: value})

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lora_rank": 100_000}, "lora_rank"),
        ({"method": "prefix"}, "method"),
        ({"optimizer": "lion9"}, "optimizer"),
        ({"stack": "mine"}, "stack"),
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"trained_tokens": 10**9}, "trained_tokens"),
        ({"micro_batch_size": 3}, "micro_batch_size"),
        ({"method": "full", "use_dora": True}, "use_dora"),
        ({"row_lengths": ((0, 5),)}, "row_lengths"),
        ({"target_modules": ()}, "target_modules"),
        ({"tokens": 999, "trained_tokens": 9}, "tokens"),
    ],
)
def test_choices_that_do_not_exist_are_refused_by_their_field(ask, changes, field):
    with pytest.raises(EstimateError) as refused:
        ask(**changes)

    assert refused.value.field == field


def test_an_unknown_gpu_and_an_uneven_share_are_refused(ask, gpu_types):
    with pytest.raises(EstimateError) as unknown:
        gpus.find(gpu_types, "h1000")
    with pytest.raises(EstimateError) as uneven:
        quote(request=ask(), pool=pool(None, gpu=gpu_types["h100-sxm-80"]), gpu_count=3)

    assert (unknown.value.field, uneven.value.field) == ("gpu", "batch_size")


def test_the_trainer_keeps_4_bit_weights_on_the_gpu(ask, models, gpu_types):
    request = ask(architecture=models["Llama-3.1-405B"], method="qlora")

    with pytest.raises(EstimateError) as refusal:
        msgspec.structs.replace(request, cpu_offload=True).__post_init__()

    assert refusal.value.field == "cpu_offload"
    found = quote(request=request, pool=pool(None, gpu=gpu_types["h100-sxm-80"]), other_gpus=tuple(gpu_types.values()))
    assert "offload" not in {fix.key for fix in found.fixes}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"num_key_value_heads": 64}, "num_key_value_heads"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": "wide"}, "moe_intermediate_size"),
        ({"num_attention_heads": 33, "num_key_value_heads": 33}, "head_dim"),
        ({"hidden_size": 4096.0}, "hidden_size"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": "every"}, "decoder_sparse_step"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 3}, "mlp_only_layers"),
    ],
)
def test_a_shape_that_no_model_has_is_refused_by_its_field(changes, field):
    config = {
        "model_type": "qwen2_moe" if "num_experts" in changes else "llama", "num_hidden_layers": 32,
        "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "vocab_size": 128_256,
    }  # fmt: skip

    with pytest.raises(EstimateError) as refused:
        from_config(config | changes)

    assert refused.value.field == field
