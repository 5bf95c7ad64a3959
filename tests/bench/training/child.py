"""The measured trainings, each in a process of its own, in the engines' environment: ours, plain TRL, and others.

`python -m tests.bench.training.child REQUESTS.json`: prints one JSON object about the machine, then one a training.
Every variant trains the same rows of the same model with the same batch, learning rate and number of steps.
"""

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import datasets
import msgspec
import torch
from peft import LoraConfig
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.contracts.runs import BaseModelRef, DatasetRef, RunSpec
from gpu_workers.common.events import EVENTS_FILE, EventWriter
from gpu_workers.train.data.encoding import encode_file, load_renderer
from gpu_workers.train.loop.callbacks import StopFlag
from gpu_workers.train.loop.sft import build_trainer
from gpu_workers.train.model.hardware import choose_engine, detect
from gpu_workers.train.model.loading import load_model
from tests.bench.training.meter import TARGETS, Meter, Request, held_out_loss

_RIVALS = ("unsloth", "axolotl")
_TOLD = ("torch", "transformers", "peft", "trl", *_RIVALS)


def main(path: Path) -> int:
    """Train one after the other; a rival that fails is told and left out, any other failure ends it."""
    requests = msgspec.json.decode(path.read_bytes(), type=list[Request])
    has_cuda = torch.version.cuda is not None and torch.cuda.is_available()
    missing = {name: reason for name in _RIVALS if (reason := _missing(name, has_cuda=has_cuda))}
    _say(_describe(has_cuda) | {"missing": sorted(missing.values())})
    for request in requests:
        if request.variant in missing:
            continue
        result = _apart(request, path.parent, has_cuda=has_cuda)
        if result is not None:
            _say(result)
        elif request.variant in _RIVALS:
            missing[request.variant] = f"{request.variant}: its training failed"
            _say({"missing": sorted(missing.values())})
        else:
            sys.stderr.write(f"{request.variant} failed\n")
            return 1
    return 0


def _missing(name: str, *, has_cuda: bool) -> str | None:
    if not has_cuda:
        return f"{name}: trains on a CUDA card only, and this machine has none"
    if importlib.util.find_spec(name) is None:
        return f"{name}: not installed in {sys.executable}"
    return None


def _describe(has_cuda: bool) -> dict[str, Any]:
    versions = {}
    for name in _TOLD:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"device": torch.cuda.get_device_name() if has_cuda else "cpu", "versions": versions}


def _apart(request: Request, folder: Path, *, has_cuda: bool) -> dict[str, Any] | None:
    """Train in a new process: forked, so that nothing is imported twice, unless CUDA or other imports forbid it."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    if request.variant in _RIVALS:
        asked = folder / "request.json"
        asked.write_bytes(msgspec.json.encode(request))
        command = [sys.executable, "-m", "tests.bench.training.rivals", str(asked), str(result), request.variant]
        subprocess.run(command, stdout=sys.stderr, check=False)
    else:
        context = multiprocessing.get_context("spawn" if has_cuda else "fork")
        process = context.Process(target=_measure, args=(request, result))
        process.start()
        process.join()
    return json.loads(result.read_bytes()) if result.is_file() else None


def _measure(request: Request, result: Path) -> None:
    os.dup2(2, 1)  # what libraries print is no result
    torch.set_num_threads(request.threads)
    set_seed(request.seed)
    with tempfile.TemporaryDirectory() as folder:
        work_dir = Path(folder)
        trainer = _ours(request, work_dir) if request.variant.startswith("ours") else _trl(request, work_dir)
        meter = Meter(request)
        meter.watch(trainer)
        trainer.train()
        result.write_text(json.dumps(meter.result(held_out_loss(trainer.model, request))))


def _ours(request: Request, work_dir: Path) -> Any:
    recipe = Hyperparameters(
        method=Method.QLORA if request.variant == "ours-qlora" else Method.LORA,
        use_dora=request.variant == "ours-dora",
        epochs=1,
        learning_rate=request.learning_rate,
        batch_size=request.batch_size,
        lr_scheduler="linear",
        warmup_ratio=0.0,
        max_length=request.max_length,
        target_modules=TARGETS,
        lora_rank=request.rank,
        lora_alpha=2 * request.rank,
        lora_dropout=0.0,
        seed=request.seed,
    )
    folder = Path(request.model)
    nothing = DatasetRef(id="", sha256="", bytes=0, rows=0, url="")
    base_model = BaseModelRef(id="bench", name="bench", path=request.model)
    spec = RunSpec(
        run_id="bench", job_id="bench", organization_id="", attempt=1, base_model=base_model, training=nothing,
        hyperparameters=recipe, checkpoint_interval_seconds=10**9,
    )  # fmt: skip
    training = encode_file(Path(request.rows), load_renderer(folder, ""), max_length=request.max_length)
    engine = choose_engine(detect(), recipe, steps=len(training) // request.batch_size)
    return build_trainer(
        model=load_model(folder, recipe, engine=engine),
        folder=folder,
        training=training,
        validation=None,
        spec=spec,
        work_dir=work_dir,
        events=EventWriter(work_dir / EVENTS_FILE),
        stop=StopFlag(),
        engine=engine,
    )


def _trl(request: Request, work_dir: Path) -> SFTTrainer:
    """What TRL's documentation shows: a dataset of prompts and completions, and a LoraConfig.

    "trl" keeps every default: padding, gradient checkpointing, bfloat16 by autocast. The others take our dtype, no
    checkpointing, and TRL's own grouping by length, or its packing.
    """
    rows = [json.loads(line)["messages"] for line in Path(request.rows).read_text().splitlines()]
    data = datasets.Dataset.from_list([{"prompt": row[:-1], "completion": row[-1:]} for row in rows])
    batch_size, length = request.batch_size, request.max_length
    tuned: dict[str, Any] = {}
    if request.variant != "trl":
        engine = choose_engine(detect(), Hyperparameters())
        dtype = {"model_init_kwargs": {"dtype": engine.dtype}, "bf16": engine.autocast == "bf16"}
        tuned = {"gradient_checkpointing": False} | dtype
    if request.variant == "trl-tuned":
        tuned |= {"train_sampling_strategy": "group_by_length"}
    if request.variant == "trl-packed":
        batch_size, length = _packed(request)
        tuned |= {"packing": True}
    config = SFTConfig(
        output_dir=str(work_dir),
        per_device_train_batch_size=batch_size,
        num_train_epochs=1,
        learning_rate=request.learning_rate,
        max_length=length,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=request.seed,
        data_seed=request.seed,
        **tuned,
    )
    adapter = LoraConfig(
        r=request.rank, lora_alpha=2 * request.rank, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    return SFTTrainer(model=request.model, args=config, train_dataset=data, peft_config=adapter)


def _packed(request: Request) -> tuple[int, int]:
    """Return how many packed sequences a step has, and their length: as many tokens a step as without packing."""
    rows = encode_file(Path(request.rows), load_renderer(Path(request.model), ""), max_length=request.max_length)
    tokens = request.batch_size * float(rows.lengths.mean())
    count = -(-tokens // request.max_length)
    return int(count), max(round(tokens / count), int(rows.lengths.max()))


def _say(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
