"""Lengths that differ: padding, attention over the square of a row, short rows, and GPUs that wait for each other."""

import random
from collections import Counter

import msgspec
import pytest

from apps.datasets.token_counts import histogram_of
from apps.estimates.physics.lengths import RowLengths
from apps.estimates.quote import quote
from tests.unit.estimates.pools import pool


@pytest.fixture
def lengths() -> list[int]:
    draw = random.Random(0)
    return [min(4000, 5 + round(draw.expovariate(1 / 300))) for _ in range(20_000)]


def test_a_row_is_padded_to_the_longest_of_its_micro_batch_and_a_histogram_says_how_long_that_is():
    known, unknown = (
        RowLengths(lengths, mean=145, longest=1000, is_lower_bound=False) for lengths in (((50, 900), (1000, 100)), ())
    )

    assert known.shuffled(1).tokens == pytest.approx(145)
    assert known.shuffled(8).tokens == pytest.approx(1000 - 950 * 0.9**8)
    assert unknown.shuffled(4).tokens == pytest.approx(145 * 25 / 12)


@pytest.mark.parametrize(("batch", "micro_batch"), [(16, 16), (16, 4), (4, 4)])
@pytest.mark.parametrize("knows_lengths", [True, False])
def test_padding_of_pairs_is_that_of_the_pools_they_are_sorted_in(batch, micro_batch, knows_lengths):
    draw = random.Random(0)
    lengths = [min(1000, 5 + round(draw.expovariate(1 / 100))) for _ in range(20_000)]
    ends = []
    for _ in range(300):
        pool = sorted(draw.sample(lengths, 4 * batch))
        ends += pool[micro_batch - 1 :: micro_batch]
    bars = tuple((end, sum(end - 20 < length <= end for length in lengths)) for end in range(20, 1001, 20))
    mean = sum(lengths) / len(lengths)

    rows = RowLengths(bars if knows_lengths else (), mean=mean, longest=1000, is_lower_bound=False)
    layout = rows.grouped(micro_batch, pool=4 * batch)

    assert layout.tokens == pytest.approx(sum(ends) / len(ends), rel=0.05)
    assert layout.attended == pytest.approx(sum(end * end for end in ends) / sum(ends), rel=0.1)


@pytest.mark.parametrize(
    "lengths",
    [((200, 900), (32_000, 100)), ((300, 800), (2000, 150), (16_000, 50)), ((500, 900), (8000, 100)), ((1000, 1000),)],
)
def test_rows_of_several_lengths_take_as_long_as_each_length_alone(ask, models, gpu_types, lengths):
    """Attention takes the square of each row, and a short row waits for its launches."""
    card = pool(None, gpu=gpu_types["h100-sxm-80"])

    def seconds(*lengths, **changes):
        tokens = sum(length * rows for length, rows in lengths)
        request = ask(
            architecture=models["Llama-3.1-8B"], max_length=32_000, rows=sum(rows for _, rows in lengths),
            tokens=tokens, trained_tokens=tokens // 4, longest_row_tokens=lengths[-1][0], row_lengths=lengths, **changes
        )  # fmt: skip
        return quote(request=request, pool=card)

    together = seconds(*lengths)
    plan = {key: getattr(together.plan, key) for key in ("micro_batch_size", "gradient_checkpointing")}
    alone = sum(seconds(each, **plan).train_seconds_p50 for each in lengths)

    assert together.train_seconds_p50 == pytest.approx(alone, rel=0.05)


def test_the_bars_of_a_file_take_as_long_as_its_rows(ask, models, gpu_types, lengths):
    card, counts = pool(None, gpu=gpu_types["h100-sxm-80"]), Counter(lengths)
    request = ask(
        architecture=models["Llama-3.1-8B"], rows=len(lengths), tokens=sum(lengths), trained_tokens=sum(lengths) // 4,
        longest_row_tokens=4000, max_length=4000, row_lengths=tuple(counts.items()),
    )  # fmt: skip

    exact, counted = (
        quote(request=msgspec.structs.replace(request, row_lengths=bars), pool=card).train_seconds_p50
        for bars in (request.row_lengths, histogram_of(counts))
    )

    assert counted == pytest.approx(exact, rel=0.02)
    rows = RowLengths(histogram_of(Counter({2000: 1000})), mean=2000, longest=2000, is_lower_bound=False)
    assert rows.unpadded().attended == 2000


@pytest.mark.parametrize(("rows", "accumulation", "gpu_count"), [(1, 1, 8), (1, 4, 8), (2, 1, 8), (4, 2, 4), (8, 1, 2)])
def test_gpus_wait_for_the_fullest_of_their_micro_batches(lengths, rows, accumulation, gpu_count):
    """A step's rows are dealt by length, forth and back. With one row each, all GPUs wait for the longest."""
    draw, fullest, count = random.Random(1), [], accumulation * gpu_count
    for _ in range(500):
        dealt = sorted(draw.sample(lengths, rows * count))
        rounds = [dealt[at : at + count] for at in range(0, len(dealt), count)]
        hands = list(zip(*(each[::-1] if index % 2 else each for index, each in enumerate(rounds)), strict=True))
        fullest += [max(hands[at : at + gpu_count], key=sum) for at in range(0, count, gpu_count)]
    tokens, squares = sum(map(sum, fullest)), sum(length * length for hand in fullest for length in hand)

    mean = sum(lengths) / len(lengths)
    distribution = RowLengths(histogram_of(Counter(lengths)), mean=mean, longest=4000, is_lower_bound=False)
    layout = distribution.balanced(rows, micro_batches=count, gpu_count=gpu_count)

    assert layout.tokens == pytest.approx(tokens / len(fullest) / rows, rel=0.06)
    assert layout.attended == pytest.approx(squares / tokens, rel=0.1)
    assert layout.tokens > 1.05 * mean


def test_attention_within_a_window_takes_the_window_of_each_token(ask, models, gpu_types):
    """Packed rows are cut by the kernel; over padded rows a mask hides scores that are computed."""
    gemma = models["Gemma-3-4b-it"]
    assert (gemma.sliding_window, gemma.windowed_layers) == (1024, 29)
    whole = msgspec.structs.replace(gemma, windowed_layers=0)
    card = pool(None, gpu=gpu_types["h100-sxm-80"])

    def attention(architecture, length, **changes):
        request = ask(
            architecture=architecture, max_length=length, longest_row_tokens=length, tokens=1000 * length,
            row_lengths=((length, 1000),), micro_batch_size=1, gradient_checkpointing=True, **changes
        )  # fmt: skip
        parts = quote(request=request, pool=card).time_parts
        return next(part.seconds for part in parts if part.key == "attention")

    reached = 2 * 1024 - 1024**2 / 16_384
    share = 5 / 34 + 29 / 34 * reached / 16_384
    assert attention(gemma, 16_384) == pytest.approx(share * attention(whole, 16_384))
    assert attention(gemma, 1024) == attention(whole, 1024)
    assert attention(gemma, 16_384, pads_rows=True) == attention(whole, 16_384, pads_rows=True)
