"""The loss of every step of one small job, compared with the committed curve.

The curve is loss_curve.json: SMALL on 32 rows, seed and rows fixed, one process, from an AVX2 machine, which trains in
float32. A machine with AVX-512 trains the same job in bfloat16. Forced on the same machine, that moves no step by more
than 1.5e-4 of its loss. A learning rate that is 10 % higher moves one by 2.6e-3. TOLERANCE lies between the two.

After an intended change of the numbers, copy the losses from the message of the failed test.
"""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from apps.contracts.chat import RenderedRow
from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import StepCompleted
from gpu_workers.train.data.encoding import ShuffledSampler
from gpu_workers.train.loop import callbacks
from tests.support.engines.attempts import Tried, attempt
from tests.support.engines.rows import SMALL, make_rows

CURVE = json.loads((Path(__file__).parent / "loss_curve.json").read_text())
TOLERANCE = 5e-4  # of a step's loss


def losses_of(tried: Tried) -> list[float]:
    return [step.train_loss for step in tried.of(StepCompleted)]


def largest_deviation(losses: list[float]) -> float:
    return max(abs(loss - expected) / expected for loss, expected in zip(losses, CURVE, strict=True))


def raise_learning_rate(patch: pytest.MonkeyPatch) -> Hyperparameters:
    return msgspec.structs.replace(SMALL, learning_rate=1.1 * SMALL.learning_rate)


def shift_label_mask(patch: pytest.MonkeyPatch) -> Hyperparameters:
    original = RenderedRow.labels

    def shifted(row: RenderedRow, ignored: int) -> list[int]:
        moved = tuple((begin - 1, end - 1) for begin, end in row.trained)
        return original(msgspec.structs.replace(row, trained=moved), ignored)

    patch.setattr(RenderedRow, "labels", shifted)
    return SMALL


def change_packing_order(patch: pytest.MonkeyPatch) -> Hyperparameters:
    patch.setattr(ShuffledSampler, "_shuffled", lambda sampler: np.arange(len(sampler)))
    return SMALL


def test_every_steps_loss_is_the_committed_one(trained):
    losses = losses_of(trained)

    assert largest_deviation(losses) < TOLERANCE, f"the losses are {[round(loss, 5) for loss in losses]}"


@pytest.mark.slow
@pytest.mark.parametrize("change", [raise_learning_rate, shift_label_mask, change_packing_order])
def test_the_curve_shows_a_change_of_the_training(
    change: Callable[[pytest.MonkeyPatch], Hyperparameters], tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(callbacks, "REPORT_INTERVAL_SECONDS", 0.0)

    changed = attempt(tmp_path, tiny_model, make_rows(32), recipe=change(monkeypatch))

    assert largest_deviation(losses_of(changed)) > 2 * TOLERANCE
