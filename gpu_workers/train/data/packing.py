"""Packing: a micro-batch as one long sequence of its rows, with the borders that keep the rows apart.

The rows of an optimizer step stay the same as without packing, and so does the loss.
"""

from collections.abc import Sequence

import numpy as np
import torch

from gpu_workers.train.data.encoding import IGNORED, TokenRow


class PackingCollator:
    """Joins rows. `position_ids` restart at each row, and no row's first token is predicted from the row before.

    With `multiple_of`, the sequence is padded to a multiple of that many tokens. The padding is behind the last border.
    It belongs to no row, has no label, and attention ignores it.
    """

    def __init__(self, *, multiple_of: int = 1) -> None:
        self._multiple_of = multiple_of

    def __call__(self, rows: Sequence[TokenRow]) -> dict[str, torch.Tensor | int]:
        """Return the batch [1, T], with the borders and the longest row as FlashAttention expects them."""
        lengths = [len(row["input_ids"]) for row in rows]
        borders = np.cumsum([0, *lengths], dtype=np.int32)
        filling = -borders[-1] % self._multiple_of
        labels = np.concatenate([*(row["labels"] for row in rows), np.full(filling, IGNORED)])
        labels[borders[:-1]] = IGNORED
        columns = {
            "input_ids": np.concatenate([*(row["input_ids"] for row in rows), np.zeros(filling)]),
            "labels": labels,
            "position_ids": np.concatenate([np.arange(length) for length in [*lengths, filling]]),
        }
        packed_BT = {name: torch.from_numpy(value.astype(np.int64)).unsqueeze(0) for name, value in columns.items()}
        return packed_BT | {
            "cu_seq_lens_q": torch.from_numpy(borders),
            "cu_seq_lens_k": torch.from_numpy(borders),
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }
