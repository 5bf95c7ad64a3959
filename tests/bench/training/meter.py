"""What every measured training shares: the request, the meter of its steps, and the loss that judges its end.

Imports neither TRL nor our trainer: some of those measured want to patch them before anybody imports them.
"""

import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import TrainerCallback

from gpu_workers.train.data.encoding import IGNORED, PaddingCollator, encode_file, load_renderer

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ROWS_AT_ONCE = 16


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`variant`: ours, ours-qlora, ours-dora, trl, trl-tuned (its grouping, our dtype), trl-packed, or a rival."""

    variant: str
    model: str
    rows: str
    held_out: str
    batch_size: int
    max_length: int
    warm_up_steps: int
    learning_rate: float = 1e-3
    rank: int = 16
    threads: int = 1
    seed: int = 0  # of the rows' order and of the adapter's first weights


class Meter(TrainerCallback):
    """Trained and all tokens, and the time, from the end of the warm-up to the end of the last step."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._steps = 0
        self._trained: list[torch.Tensor] = []  # counted at the end: nothing here waits for a device
        self._tokens = 0
        self._began = self._cpu_began = 0.0
        self._seconds = self._cpu_seconds = 0.0

    def watch(self, trainer: Any) -> None:
        inner = trainer.training_step

        def training_step(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            if self._steps >= self._request.warm_up_steps:
                self._trained.append((inputs["labels"][:, 1:] != IGNORED).sum())
                self._tokens += inputs["input_ids"].numel()
            return inner(model, inputs, *args, **kwargs)

        trainer.training_step = training_step
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, cpu = time.perf_counter(), time.process_time()
        if self._steps == self._request.warm_up_steps:
            self._began, self._cpu_began = now, cpu
        self._seconds, self._cpu_seconds = now - self._began, cpu - self._cpu_began

    def result(self, loss: float) -> dict[str, Any]:
        measured = self._steps - self._request.warm_up_steps
        if measured < 1:
            raise SystemExit(f"{self._request.variant}: {self._steps} steps are too few to measure; ask for more.")
        trained = sum(int(count) for count in self._trained)
        return {
            "variant": self._request.variant,
            "seed": self._request.seed,
            "steps": measured,
            "seconds": self._seconds,
            "cpu_seconds": self._cpu_seconds,
            "trained_tokens": trained,
            "trained_tokens_per_second": trained / self._seconds,
            "processed_tokens_per_second": self._tokens / self._seconds,
            "held_out_loss": loss,
        }


@torch.no_grad()
def held_out_loss(model: Any, request: Request) -> float:
    """The mean loss over the trained tokens of rows that neither side trained on, in float32 sums."""
    folder = Path(request.model)
    rows = encode_file(Path(request.held_out), load_renderer(folder, ""), max_length=request.max_length)
    collate = PaddingCollator(0)
    model.eval()
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        batch = collate(rows.items(list(range(at, min(at + _ROWS_AT_ONCE, len(rows))))))  # type: ignore[arg-type]
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].float()
        labels = batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        total += float(loss)
        count += int((labels != IGNORED).sum())
    return total / count
