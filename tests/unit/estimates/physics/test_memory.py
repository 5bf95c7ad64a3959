"""Memory: published arithmetic, and that more work never needs less."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.estimates.models.architectures import from_config
from apps.estimates.models.shapes import shape_of
from apps.estimates.physics import gpus
from apps.estimates.physics.gpus import GIB
from apps.estimates.physics.memory import MemoryModel, peak_memory, weight_bytes
from apps.estimates.physics.plans import TrainingPlan
from apps.estimates.physics.stacks import ANNEAL, STACKS

GB = 1e9
SEVENTY = "Llama-3.1-70B"
SMALL = from_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 8,
        "vocab_size": 4096,
    }
)
CARD = gpus.Gpu(key="card", name="Card", memory_bytes=24 * GIB, bf16_flops=1e14)


def peak(architecture, gpu, stack="anneal", **settings):
    return peak_memory(architecture=architecture, plan=TrainingPlan(**settings), gpu=gpu, stack=STACKS[stack])


def part(estimate, key):
    return next(part.bytes for part in estimate.parts if part.key == key)


@pytest.mark.parametrize(("gpu_key", "max_length"), [("l40s-48", 512), ("h100-sxm-80", 4096), ("h100-sxm-80", 8192)])
def test_qlora_of_a_70b_fits_the_cards_it_is_known_to_fit(models, gpu_types, gpu_key, max_length):
    estimate = peak(models[SEVENTY], gpu_types[gpu_key], method="qlora", max_length=max_length)

    assert 41 * GB <= estimate.peak_bytes <= gpu_types[gpu_key].memory_bytes


def test_4_bit_weights_are_half_a_byte_and_their_scales():
    plan, bare = TrainingPlan(method="qlora", max_length=1), TrainingPlan(method="lora", max_length=1)
    upcast = msgspec.structs.replace(ANNEAL, upcasts_unquantized=True)
    plain = msgspec.structs.replace(ANNEAL, double_quantization=False)
    linear = 4 * (4 * 256 * 256 + 3 * 256 * 688)
    other = weight_bytes(architecture=SMALL, plan=bare) - 2 * linear

    def weights(stack):
        return weight_bytes(architecture=SMALL, plan=plan, stack=stack)

    assert weights(plain) - other == round(linear * 0.5625)
    assert weights(ANNEAL) - other == pytest.approx(linear * 0.5159, rel=1e-3)
    assert weights(upcast) - weights(ANNEAL) == other  # embeddings, head and norms to fp32


def test_checkpointing_saves_activations(models):
    kept, recomputed = (
        part(
            peak(models["Llama-3.1-8B"], CARD, method="lora", max_length=2048, gradient_checkpointing=checkpointing),
            "activations",
        )
        for checkpointing in (False, True)
    )

    assert recomputed < kept / 5


# Peak resident set, in MiB, of three LoRA steps (rank 16, all linear layers, dropout 0.05, fp32), TRL's fused head, on
# a 2-core machine: torch 2.13, transformers 5.19, peft 0.21, trl 1.16.
@pytest.mark.parametrize(
    ("layers", "rows", "length", "gradient_checkpointing", "measured_mib"),
    [
        (8, 1, 16, False, 801),
        (2, 1, 16, False, 698),
        (16, 2, 256, False, 2347),
        (8, 4, 256, False, 2503),
        (8, 4, 512, False, 3905),
        (8, 4, 512, True, 2702),
    ],
)
def test_cpu_jobs_measured_here_are_covered(layers, rows, length, gradient_checkpointing, measured_mib):
    config = {"num_hidden_layers": layers, "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8}
    architecture = from_config({"model_type": "llama", "vocab_size": 16_384, **config})

    estimate = peak(
        architecture,
        gpus.cpu(memory_bytes=8 * GIB),
        method="lora",
        max_length=length,
        micro_batch_size=rows,
        gradient_checkpointing=gradient_checkpointing,
        compute_dtype="float32",
    )

    assert 0.98 <= estimate.peak_bytes / 2**20 / measured_mib <= 1.2


def test_a_cpu_has_no_cuda_context():
    on_cpu = peak(SMALL, gpus.cpu(memory_bytes=8 * GIB), method="lora", max_length=128, compute_dtype="float32")
    on_gpu = peak(SMALL, CARD, method="lora", max_length=128)

    assert part(on_cpu, "framework") < 1 * GIB < part(on_gpu, "framework")


settings = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["lora", "qlora", "full"]),
        "max_length": st.integers(1, 8192),
        "lora_rank": st.integers(1, 256),
        "micro_batch_size": st.integers(1, 16),
        "gradient_checkpointing": st.booleans(),
        "stack": st.sampled_from(sorted(STACKS)),
        "use_dora": st.booleans(),
        "parallelism": st.sampled_from(["single", "ddp", "zero1", "zero2", "zero3"]),
        "gpu_count": st.integers(1, 8),
    }
)


@given(
    settings=settings, field=st.sampled_from(["max_length", "lora_rank", "micro_batch_size"]), more=st.integers(1, 64)
)
def test_more_work_never_needs_less_memory(settings, field, more):
    larger = settings | {field: settings[field] + more}

    assert peak(SMALL, CARD, **larger).peak_bytes >= peak(SMALL, CARD, **settings).peak_bytes


@given(settings=settings)
def test_the_parts_add_up_to_the_peak_and_the_peak_is_the_largest_phase(settings):
    estimate = peak(SMALL, CARD, **settings)

    assert sum(part.bytes for part in estimate.parts) == estimate.peak_bytes == max(estimate.phase_bytes.values())
    assert all(part.bytes >= 0 for part in estimate.parts)
    assert msgspec.json.decode(msgspec.json.encode(estimate))["phase"] == estimate.phase


@given(settings=settings)
def test_the_figure_that_searches_use_is_that_of_the_estimate(settings):
    plan, stack = TrainingPlan(**{k: v for k, v in settings.items() if k != "stack"}), STACKS[settings["stack"]]
    shape = shape_of(SMALL, rank=plan.lora_rank, target_modules=plan.target_modules, use_dora=plan.use_dora)
    model = MemoryModel(shape, plan, CARD, stack)

    searched = model.peak(plan.micro_batch_size, plan.max_length, plan.gradient_checkpointing)

    assert searched == pytest.approx(model.estimate(plan).peak_bytes, abs=16)


@pytest.mark.parametrize(("optimizer", "bytes_each"), [("adamw", 12), ("adamw_8bit", 6.03), ("adafactor", 4.04)])
def test_optimizers_keep_what_their_papers_say(models, optimizer, bytes_each):
    model = models["Llama-3.1-8B"]

    state = part(peak(model, CARD, method="full", max_length=64, optimizer=optimizer), "optimizer")

    assert state / 8_030_261_248 == pytest.approx(bytes_each, rel=0.01)


def test_dora_needs_more_than_lora_and_less_than_twice_its_activations(models):
    plain, dora = (
        peak(models["Llama-3.1-8B"], CARD, method="lora", max_length=16384, use_dora=use, gradient_checkpointing=False)
        for use in (False, True)
    )

    assert part(plain, "activations") < part(dora, "activations") < 2 * part(plain, "activations")


def test_experts_of_a_mixture_stay_in_16_bits_where_they_are_one_tensor(models):
    model, plan = models["Qwen3-30B-A3B"], TrainingPlan(method="qlora", max_length=1)
    experts = 48 * 128 * 3 * 2048 * 768

    held = {key: weight_bytes(architecture=model, plan=plan, stack=STACKS[key]) for key in ("anneal", "unsloth")}

    assert held["unsloth"] < 18 * GIB
    assert held["anneal"] - held["unsloth"] == pytest.approx(experts * (2 - 0.5159), rel=1e-3)


def test_full_training_that_accumulates_holds_gradients_and_16_bit_copies_at_once(models):
    def size(**changes):
        estimate = peak(models["Llama-3.1-8B"], CARD, method="full", max_length=64, **changes)
        return estimate.peak_bytes / 8_030_261_248

    assert 16 <= size() < 16.5
    assert 17.7 <= size(gradient_accumulation_steps=2) < 18.3  # of the layers' matrices only
    assert size(gradient_accumulation_steps=2, stack="foundry") < 16.5
