"""Loss and token accuracy on the validation rows. No random numbers are drawn, so a resume is not affected."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed

from apps.contracts.runs import Struct
from gpu_workers.common.pulse import beat
from gpu_workers.train.data.rows import Rows, SomeRows
from gpu_workers.train.loop.process_group import is_distributed

LossParts = Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Evaluation(Struct, frozen=True, kw_only=True):
    valid_loss: float
    valid_mean_token_accuracy: float


def evaluate(
    model: torch.nn.Module,
    rows: Rows | SomeRows,
    *,
    device: torch.device,
    collate: Callable[..., dict[str, torch.Tensor]],
    batch_size: int,
    loss_parts: LossParts,
    should_stop: Callable[[], bool],
) -> Evaluation | None:
    """Return the mean over trained tokens, or None if stopped in the middle.

    `device` computes; the weights may be in the host's memory.
    """
    was_training = model.training
    model.eval()
    totals = np.zeros(3)
    try:
        with torch.no_grad():
            order = np.argsort(rows.lengths, kind="stable")
            for indices in np.array_split(order, max(1, -(-len(order) // batch_size))):
                if should_stop():
                    return None
                batch = {name: tensor.to(device) for name, tensor in collate(rows.items(indices)).items()}
                beat()
                totals += [float(part) for part in loss_parts(model, batch)]
    finally:
        model.train(was_training)
    if is_distributed():  # the first one's numbers count: all must find the same evaluation the best
        agreed = torch.from_numpy(totals).to(device)
        torch.distributed.broadcast(agreed, src=0)
        totals = agreed.cpu().numpy()
    loss, n_correct, n_trained = totals.tolist()
    return Evaluation(valid_loss=loss / n_trained, valid_mean_token_accuracy=n_correct / n_trained)
