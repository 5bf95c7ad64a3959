"""Which rows a step has, in what order, and that packing them changes nothing but the padding."""

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import set_seed

from gpu_workers.train.data.encoding import LengthGroupedSampler, PaddingCollator, ShuffledSampler
from gpu_workers.train.data.packing import PackingCollator
from gpu_workers.train.loop.sft import _score_selected
from gpu_workers.train.model.attention import register_attention

LENGTHS = np.random.default_rng(0).integers(5, 60, 1003)


@pytest.mark.parametrize("sampler_class", [ShuffledSampler, LengthGroupedSampler])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_an_epoch_has_every_row_once_in_an_order_of_seed_and_epoch_alone(sampler_class, micro_batches):
    sampler = sampler_class(LENGTHS, batch_size=8, seed=1, micro_batches=micro_batches)

    first, again = list(sampler), list(sampler)
    sampler.epoch = 1
    second = list(sampler)

    assert sorted(first) == list(range(1003))
    assert first == again
    assert first != second


def test_rows_that_are_padded_stand_beside_others_of_their_length():
    order = list(LengthGroupedSampler(LENGTHS, batch_size=8, seed=1))

    padding = [LENGTHS[order[i : i + 8]].max() - LENGTHS[order[i : i + 8]].mean() for i in range(0, 1000, 8)]
    assert (
        np.mean(padding)
        < 8
        < np.mean([LENGTHS[i : i + 8].max() - LENGTHS[i : i + 8].mean() for i in range(0, 1000, 8)])
    )


def test_a_step_has_the_rows_that_transformers_own_trainer_draws(tiny_model, tmp_path):
    set_seed(7)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=8, seed=7, data_seed=7, use_cpu=True, report_to=[]
    )
    rows = datasets.Dataset.from_dict({"input_ids": [[i] for i in range(100)]})
    trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(tiny_model), args=arguments, train_dataset=rows)
    theirs = [batch["input_ids"].flatten().tolist() for batch in trainer.get_train_dataloader()]

    ours = list(ShuffledSampler(np.ones(100, dtype=np.int64), batch_size=8, seed=7))

    assert [ours[i : i + 8] for i in range(0, 100, 8)] == theirs


def test_long_rows_are_shared_among_the_micro_batches_of_their_step():
    plain = list(ShuffledSampler(LENGTHS, batch_size=32, seed=1))
    shared = list(ShuffledSampler(LENGTHS, batch_size=32, seed=1, micro_batches=8))

    assert [sorted(plain[i : i + 32]) for i in range(0, 992, 32)] == [
        sorted(shared[i : i + 32]) for i in range(0, 992, 32)
    ]
    assert _mean_of_most(shared) < 1.05 < 1.3 < _mean_of_most(plain)


def _mean_of_most(order: list[int]) -> float:
    """Tokens of a step's longest micro-batch of 4 rows to the mean of its 8: what the slowest process has to do."""
    tokens = LENGTHS[np.array(order[:992])].reshape(-1, 8, 4).sum(2)
    return float((tokens.max(1) / tokens.mean(1)).mean())


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_have_the_loss_and_gradients_of_padded_ones(window: int | None, dtype, tmp_path: Path):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=window, attn_implementation=register_attention(),
    )  # fmt: skip
    model = MistralForCausalLM(config).to(dtype)
    rows = [
        {"input_ids": row, "labels": [-100, -100, *row[2:]]}
        for row in ([5, 9, 8, 7, 3, 2, 6], [4, 1, 2], [9, 3, 7, 7, 1])
    ]
    results = []
    for collator in (PaddingCollator(0), PackingCollator(), PackingCollator(multiple_of=8)):
        model.zero_grad()
        loss, _, n_trained = _score_selected(model, collator(rows))
        loss.backward()
        results.append((loss.item() / n_trained, [parameter.grad.clone() for parameter in model.parameters()]))

    (loss, gradients), *packed = results
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.02}
    for packed_loss, packed_gradients in packed:
        torch.testing.assert_close(packed_loss, loss, **tolerance)
        torch.testing.assert_close(packed_gradients, gradients, **tolerance)


def test_a_filled_batch_has_a_round_length_and_counts_its_rows_alone():
    rows = [{"input_ids": [5, 9, 8], "labels": [-100, 9, 8]}, {"input_ids": [4, 1], "labels": [-100, 1]}]

    batch = PackingCollator(multiple_of=8)(rows)

    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, 8)
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert batch["labels"][0].tolist() == [-100, 9, 8, -100, 1, -100, -100, -100]
