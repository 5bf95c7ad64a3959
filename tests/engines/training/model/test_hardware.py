"""The engine that follows from a machine, without the machine."""

import msgspec
import pytest
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig, Qwen3Config, Qwen3NextConfig

from apps.contracts.hyperparameters import Hyperparameters, Method, Objective
from gpu_workers.train.model.attention import attention_of
from gpu_workers.train.model.hardware import Attention, Hardware, choose_engine, detect
from gpu_workers.train.model.loading import attention_implementation

H100 = Hardware(
    name="H100", capability=(9, 0), has_bf16=True, has_flash_attention=True, has_liger=True, has_triton=True
)
T4 = Hardware(name="T4", capability=(7, 5), has_triton=True)
CPU = Hardware(name="the CPU", has_bf16=True, threads=1, cores=2)
OLD_CPU = Hardware(name="the CPU")


def engine_of(hardware, *, steps=0, **recipe):
    return choose_engine(hardware, Hyperparameters(**recipe), steps=steps)


@pytest.mark.parametrize(
    ("hardware", "method", "dtype", "autocast"),
    [
        (H100, Method.LORA, "bfloat16", "bf16"),
        (H100, Method.FULL, "float32", "bf16"),
        (T4, Method.QLORA, "float16", "fp16"),
        (T4, Method.FULL, "float32", "fp16"),
        (CPU, Method.LORA, "bfloat16", None),
        (CPU, Method.FULL, "float32", None),
        (OLD_CPU, Method.LORA, "float32", None),
    ],
)
def test_precision_follows_the_hardware_and_what_is_trained(hardware, method, dtype, autocast):
    engine = engine_of(hardware, method=method)

    assert (engine.dtype, engine.autocast) == (dtype, autocast)


def test_rows_are_packed_where_a_kernel_keeps_them_apart():
    assert engine_of(H100).is_packing
    assert engine_of(msgspec.structs.replace(H100, has_flash_attention=False)).is_packing  # torch's own varlen kernel
    assert not engine_of(H100, packing=False).is_packing
    assert not engine_of(H100, objective=Objective.DPO).is_packing
    assert not engine_of(T4).is_packing
    assert engine_of(T4, packing=True).is_packing
    assert engine_of(CPU).is_packing  # row by row
    assert not engine_of(CPU, packing=False).is_packing


@pytest.mark.parametrize(
    ("hardware", "attention", "is_own", "is_packing"),
    [
        (H100, Attention.CAPPED, False, True),  # flash_attn has a soft cap
        (msgspec.structs.replace(H100, has_flash_attention=False), Attention.CAPPED, True, False),
        (CPU, Attention.CAPPED, True, False),
        (H100, Attention.OWN, True, False),
        (CPU, Attention.OWN, True, False),
    ],
)
def test_what_no_kernel_computes_is_left_to_the_model_itself(hardware, attention, is_own, is_packing):
    engine = choose_engine(hardware, Hyperparameters(packing=True), attention=attention)

    assert (engine.uses_own_attention, engine.is_packing) == (is_own, is_packing)
    assert (attention_implementation(engine) == "eager") is is_own


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (LlamaConfig(), Attention.PLAIN),
        (Qwen3Config(), Attention.PLAIN),
        (MistralConfig(sliding_window=4096), Attention.PLAIN),
        (Gemma2Config(), Attention.CAPPED),
        (Gemma2Config(attn_logit_softcapping=None), Attention.PLAIN),
        (GptOssConfig(), Attention.OWN),  # sinks
        (Qwen3NextConfig(), Attention.OWN),  # three layers of four keep a state
    ],
)
def test_a_models_attention_is_read_from_its_config(config, attention, tmp_path):
    config.save_pretrained(tmp_path)

    assert attention_of(tmp_path) is attention


def test_compiling_is_left_to_long_runs_of_plain_batches():
    assert engine_of(H100, packing=False, steps=5_000).is_compiled
    assert not engine_of(H100, packing=False, steps=50).is_compiled
    assert not engine_of(H100, packing=False, steps=5_000, method=Method.QLORA).is_compiled
    assert not engine_of(CPU, steps=5_000).is_compiled


@pytest.mark.parametrize("hardware", [H100, T4, CPU, OLD_CPU, detect()])
def test_every_choice_says_why(hardware):
    engine = engine_of(hardware)

    assert [reason.partition(":")[0] for reason in engine.reasons] == [
        "Precision",
        "Batches",
        "Attention",
        "Kernels",
        "torch.compile",
        "Optimizer",
        *([] if hardware.is_gpu else ["Threads"]),
    ]
    assert all(reason.endswith(".") for reason in engine.reasons)


@pytest.mark.parametrize(
    ("hardware", "method", "said"),
    [
        (H100, Method.LORA, "the flash_attn package"),
        (H100, Method.FULL, "takes no weights in float32"),
        (msgspec.structs.replace(T4, has_flash_attention=True), Method.LORA, "needs a newer GPU than T4"),
        (T4, Method.LORA, "flash_attn is not installed"),
        (CPU, Method.LORA, "the CPU has no fast 16-bit backward"),
    ],
)
def test_the_attention_taken_is_the_one_named(hardware, method, said):
    engine = engine_of(hardware, method=method)

    assert said in engine.reasons[2]
    assert engine.uses_flash_attention is (said == "the flash_attn package")
