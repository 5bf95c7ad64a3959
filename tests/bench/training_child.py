"""One measured training in a process of its own, in the engines' environment: ours, or a plain TRL script.

`python -m tests.bench.training_child REQUEST.json`: prints one JSON object. Every variant trains the same rows of the
same model with the same batch, learning rate and number of steps, and is judged by the same loss at its end.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import msgspec
import torch
from peft import LoraConfig
from transformers import TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from apps.contracts.runs import BaseModelRef, DatasetRef, Hyperparameters, Method, RunSpec
from gpu_workers.events import EVENTS_FILE, EventWriter
from gpu_workers.train.callbacks import StopFlag
from gpu_workers.train.data import IGNORED, PaddingCollator, encode_file, load_renderer
from gpu_workers.train.hardware import choose_engine, detect
from gpu_workers.train.model import load_model
from gpu_workers.train.sft import build_trainer

WARM_UP_STEPS = 3
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`variant`: ours, ours-qlora, ours-dora, trl, trl-tuned (its grouping, our dtype) or trl-packed."""

    variant: str
    model: str
    rows: str
    held_out: str
    batch_size: int
    epochs: int
    max_length: int
    learning_rate: float = 1e-3
    rank: int = 16
    threads: int = 1


class Meter(TrainerCallback):
    """Trained and all tokens, and the time, from the end of the warm-up to the end of the last step."""

    def __init__(self) -> None:
        self.steps = 0
        self.trained = self.tokens = 0
        self._began = 0.0
        self.seconds = 0.0

    def watch(self, trainer: Any) -> None:
        inner = trainer.training_step

        def training_step(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            if self.steps >= WARM_UP_STEPS:
                self.trained += int((inputs["labels"][:, 1:] != IGNORED).sum())
                self.tokens += int(inputs["input_ids"].numel())
            return inner(model, inputs, *args, **kwargs)

        trainer.training_step = training_step
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.steps == WARM_UP_STEPS:
            self._began = now
        self.seconds = now - self._began


def main(path: Path) -> None:
    request = msgspec.json.decode(path.read_bytes(), type=Request)
    torch.set_num_threads(request.threads)
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        work_dir = Path(folder)
        trainer = _ours(request, work_dir) if request.variant.startswith("ours") else _trl(request, work_dir)
        meter = Meter()
        meter.watch(trainer)
        trainer.train()
        if meter.steps <= WARM_UP_STEPS:
            raise SystemExit(f"{request.variant}: {meter.steps} steps are too few to measure; ask for more.")
        result = {
            "variant": request.variant,
            "steps": meter.steps,
            "seconds": meter.seconds,
            "trained_tokens_per_second": meter.trained / meter.seconds,
            "processed_tokens_per_second": meter.tokens / meter.seconds,
            "held_out_loss": _loss(trainer.model, request),
        }
    sys.stdout.write(json.dumps(result) + "\n")


def _ours(request: Request, work_dir: Path) -> Any:
    recipe = Hyperparameters(
        method=Method.QLORA if request.variant == "ours-qlora" else Method.LORA,
        use_dora=request.variant == "ours-dora",
        epochs=request.epochs,
        learning_rate=request.learning_rate,
        batch_size=request.batch_size,
        lr_scheduler="linear",
        warmup_ratio=0.0,
        max_length=request.max_length,
        lora_rank=request.rank,
        lora_alpha=2 * request.rank,
        lora_dropout=0.0,
    )
    folder = Path(request.model)
    nothing = DatasetRef(id="", sha256="", bytes=0, rows=0, url="")
    base_model = BaseModelRef(id="bench", name="bench", path=request.model)
    spec = RunSpec(
        run_id="bench", job_id="bench", organization_id="", attempt=1, base_model=base_model, training=nothing,
        hyperparameters=recipe, checkpoint_interval_seconds=10**9,
    )  # fmt: skip
    engine = choose_engine(detect(), recipe)
    return build_trainer(
        model=load_model(folder, recipe, engine=engine),
        folder=folder,
        training=encode_file(Path(request.rows), load_renderer(folder, ""), max_length=request.max_length),
        validation=None,
        spec=spec,
        work_dir=work_dir,
        events=EventWriter(work_dir / EVENTS_FILE),
        stop=StopFlag(),
        engine=engine,
    )


def _trl(request: Request, work_dir: Path) -> SFTTrainer:
    """What TRL's documentation shows: a dataset of prompts and completions, and a LoraConfig. Padding, its defaults."""
    rows = [json.loads(line)["messages"] for line in Path(request.rows).read_text().splitlines()]
    data = datasets.Dataset.from_list([{"prompt": row[:-1], "completion": row[-1:]} for row in rows])
    tuned: dict[str, Any] = {}
    if request.variant != "trl":
        dtype = choose_engine(detect(), Hyperparameters()).dtype
        tuned = {"gradient_checkpointing": False, "model_init_kwargs": {"dtype": dtype}, "bf16": False}
        tuned |= (
            {"packing": True} if request.variant == "trl-packed" else {"train_sampling_strategy": "group_by_length"}
        )
    config = SFTConfig(
        output_dir=str(work_dir),
        per_device_train_batch_size=_sequences_a_step(request),
        num_train_epochs=request.epochs,
        learning_rate=request.learning_rate,
        max_length=request.max_length,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **tuned,
    )
    adapter = LoraConfig(
        r=request.rank, lora_alpha=2 * request.rank, target_modules=list(_TARGETS), task_type="CAUSAL_LM"
    )
    return SFTTrainer(model=request.model, args=config, train_dataset=data, peft_config=adapter)


def _sequences_a_step(request: Request) -> int:
    """Packed sequences hold several rows each: so many of them that a step sees as many tokens as without packing."""
    if request.variant != "trl-packed":
        return request.batch_size
    rows = encode_file(Path(request.rows), load_renderer(Path(request.model), ""), max_length=request.max_length)
    return max(1, round(request.batch_size * float(rows.lengths.mean()) / request.max_length))


@torch.no_grad()
def _loss(model: Any, request: Request) -> float:
    """The mean loss over the trained tokens of rows that nobody trained on, in float32 sums."""
    folder = Path(request.model)
    rows = encode_file(Path(request.held_out), load_renderer(folder, ""), max_length=request.max_length)
    model.eval()
    total, count = 0.0, 0
    for at in range(0, len(rows), 16):
        batch = PaddingCollator(0)(rows.items(list(range(at, min(at + 16, len(rows))))))
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].float()
        labels = batch["labels"][:, 1:]
        total += float(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        )
        count += int((labels != IGNORED).sum())
    return total / count


if __name__ == "__main__":
    main(Path(sys.argv[1]))
