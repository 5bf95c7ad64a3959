"""The path of one family: installed, quoted, trained, resumed, certified, served as an adapter and merged."""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import peft
import torch
from transformers import AutoModelForCausalLM

from apps.contracts.adapter_files import SUPPORT
from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.contracts.parity import PARITY_FILE, TOLERANCE, ParityProbe, problem_of
from apps.contracts.runs import StepCompleted, Stopped
from apps.contracts.serving import DesiredAdapter, LoadState
from apps.estimates.quote import PoolFacts, QuoteRequest, quote
from apps.interfaces.cli.catalog import find_gpus
from gpu_workers.train.after.merge import merge_adapter
from gpu_workers.train.after.publish import examine
from gpu_workers.train.after.scoring import token_logprobs
from gpu_workers.train.loop import callbacks
from gpu_workers.train.loop.callbacks import StopFlag
from tests.bench.families.install import InstalledModel, install
from tests.bench.families.merged import score_merged
from tests.bench.families.table import FamilyResult
from tests.support.engines.attempts import Tried, attempt, make_run_spec
from tests.support.engines.control_plane import ControlPlane
from tests.support.engines.miniatures import MINIATURES, write_miniature
from tests.support.engines.models import SERVED_NAME, name_of
from tests.support.engines.replica import START_SECONDS, Replica
from tests.support.engines.rows import make_rows
from tests.support.waiting import wait_until

RANK, ROWS, EPOCHS, BATCH = 8, 32, 4, 4
STEPS = ROWS // BATCH * EPOCHS
_STOP_AT = STEPS // 2 + 1
_NEW_TOKENS = 8
_ERRORS = re.compile(r"\b(\w*(?:Error|Exception): .*)")
METHODS = (Method.LORA, Method.QLORA)


class FamilyFailed(Exception):
    """A step of the path did not give what it must; the message says which and why."""


def walk(name: str, folder: Path) -> FamilyResult:
    """Return what the family's path measured, with the error that ended it, if any did."""
    mini = MINIATURES[name]
    support = SUPPORT[mini.architecture]
    found = FamilyResult(family=name, architecture=mini.architecture, example=mini.example)
    step = "install"
    try:
        base = write_miniature(name, folder / "base")
        model = install(base)
        found.parameters = model.parameter_count
        step = "quote"
        found.quoted_bytes = _quoted_bytes(model, support.modules)
        trained: dict[Method, Path] = {}
        for method in METHODS:
            step = f"{method} training"
            trained[method] = _train(found, method, base, folder, support.modules)
        found.is_trained = True
        step = "PEFT"
        _load_with_peft(found, base, trained[Method.LORA])
        step = "serving adapters"
        _serve_adapters(found, base, folder / "replica", trained)
        step = "serving the merged model"
        _serve_merged(found, base, folder, trained[Method.LORA])
        found.served = "adapter"
    except Exception as error:  # noqa: BLE001 - the next family is still to be tried
        found.error = f"{step}: {type(error).__name__}: {error}"[:600]
    return found


def _quoted_bytes(model: InstalledModel, modules: tuple[str, ...]) -> int:
    """Return the memory of the job by its quote on an H100, with the model's own config.json."""
    request = QuoteRequest(
        architecture=model.architecture, method=Method.QLORA, max_length=128, batch_size=BATCH, epochs=EPOCHS,
        rows=ROWS, tokens=ROWS * 30, trained_tokens=ROWS * 3, longest_row_tokens=40, lora_rank=RANK,
        target_modules=modules,
    )  # fmt: skip
    return quote(request=request, pool=PoolFacts(gpu=find_gpus("h100")[0])).peak_bytes


# --- training -----------------------------------------------------------------------------------------------------


def _train(found: FamilyResult, method: Method, base: Path, folder: Path, modules: tuple[str, ...]) -> Path:
    """Train to the end, LoRA once more with an interruption; return the folder of the published adapter."""
    recipe = Hyperparameters(
        method=method, quantization="nf4" if method is Method.QLORA else None, epochs=EPOCHS, batch_size=BATCH,
        learning_rate=5e-3, lora_rank=RANK, lora_alpha=2 * RANK, lora_dropout=0.1, max_length=128,
        target_modules=modules,
    )  # fmt: skip
    work_dir = folder / method
    whole = attempt(work_dir, base, make_rows(ROWS), recipe=recipe)
    losses = [step.train_loss for step in whole.of(StepCompleted)]
    first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
    found.losses[method] = (round(first, 3), round(last, 3))
    if not last < first - 0.3:
        raise FamilyFailed(f"the loss did not fall: {first:.2f} to {last:.2f}")
    if method is Method.LORA:
        found.is_resumed_exactly = _is_resumed_exactly(whole, folder, base, recipe)
        if not found.is_resumed_exactly:
            raise FamilyFailed("an interrupted run ended with other weights")
    sealed = examine(work_dir, make_run_spec(base, recipe), base).sealed
    assert sealed
    return work_dir / sealed.folder


def _is_resumed_exactly(whole: Tried, folder: Path, base: Path, recipe: Hyperparameters) -> bool:
    with _stopping(_STOP_AT) as stop:
        part = attempt(folder / "part", base, make_rows(ROWS), recipe=recipe, stop=stop)
    assert isinstance(part.outcome, Stopped)
    rest = attempt(folder / "rest", base, make_rows(ROWS), recipe=recipe, resume=part.newest_checkpoint)
    theirs = rest.tensors()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in whole.tensors().items())


@contextmanager
def _stopping(at: int) -> Iterator[StopFlag]:
    """Yield a flag that is set before the step `at` ends, as by SIGTERM."""
    stop, original = StopFlag(), callbacks.ProgressCallback.on_step_end

    def on_step_end(callback: Any, args: Any, state: Any, control: Any, **options: Any) -> None:
        stop.is_set = state.global_step == at
        original(callback, args, state, control, **options)

    with patch.object(callbacks.ProgressCallback, "on_step_end", on_step_end):
        yield stop


# --- what is delivered ----------------------------------------------------------------------------------------------


def _load_with_peft(found: FamilyResult, base: Path, adapter: Path) -> None:
    model = peft.PeftModel.from_pretrained(_plain(base), adapter).to(torch.bfloat16).eval()
    probe = _probe(adapter)
    found.peft_difference = round(_difference([token_logprobs(model, row.token_ids) for row in probe.rows], probe), 4)
    if found.peft_difference > TOLERANCE:
        raise FamilyFailed(f"plain PEFT gives other numbers, by {found.peft_difference} nats")


def _serve_adapters(found: FamilyResult, base: Path, folder: Path, trained: dict[Method, Path]) -> None:
    """Serve both adapters at once, each with its certificate; compare greedy answers with the trainer's."""
    plane = ControlPlane(base_model_path=str(base), served_name=SERVED_NAME)
    names = {method: name_of(method) for method in trained}
    with _running(folder, plane) as replica:
        _load(replica, *(plane.describe(names[m], _files(path), rank=RANK) for m, path in trained.items()))
        for method, adapter in trained.items():
            row = plane.get_adapter(names[method])
            if row is None or row.state is not LoadState.LOADED or row.parity is None:
                raise FamilyFailed(f"the {method} adapter was refused: {row.reason if row else 'not reported'}")
            if problem := problem_of(row.parity):
                raise FamilyFailed(problem)
            found.differences[method] = round(row.parity.tuned_difference, 4)
            found.effects[method] = round(row.parity.effect, 3)
            found.base_difference = round(row.parity.base_difference, 4)
            found.equal_tokens[method] = _count_equal_tokens(replica, names[method], base, adapter)


def _load(replica: Replica, *adapters: DesiredAdapter) -> None:
    """Have the replica load them. Raises FamilyFailed with the engine's own words if it dies."""
    generation = replica.plane.want(*adapters)
    log = replica.paths.work_dir / "engine.launcher.log"

    def is_settled() -> bool:
        words = log.read_text(errors="replace") if log.is_file() else ""
        if " ended with " in words:
            raise FamilyFailed(f"the engine died: {next(iter(_ERRORS.findall(words)), 'without a word')}")
        seen = replica.plane.observed[-1] if replica.plane.observed else None
        if seen is None or not seen.is_ready or seen.generation != generation:
            return False
        return {row.state for row in seen.adapters} <= {LoadState.LOADED, LoadState.REJECTED}

    wait_until(is_settled, "a verdict on every adapter", seconds=START_SECONDS)


def _count_equal_tokens(replica: Replica, served: str, base: Path, adapter: Path) -> int:
    chat = _probe(adapter).chat
    assert chat is not None
    body = {
        "model": served, "prompt": list(chat.token_ids), "max_tokens": _NEW_TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    theirs = replica.engine_http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["token_ids"]
    model = peft.PeftModel.from_pretrained(_plain(base), adapter).to(torch.bfloat16).eval()
    ids = list(chat.token_ids)
    for _ in range(_NEW_TOKENS):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    ours = ids[len(chat.token_ids) :]
    return next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), _NEW_TOKENS)


def _serve_merged(found: FamilyResult, base: Path, folder: Path, adapter: Path) -> None:
    """Score the probe's rows with the merged model in a vLLM of its own, forked from this process."""
    merge_adapter(base, adapter, folder / "merged")
    probe = _probe(adapter)
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as child:
        scores = child.submit(score_merged, folder / "merged", [row.token_ids for row in probe.rows]).result()
    found.merged_difference = round(_difference(scores, probe), 4)
    if found.merged_difference > TOLERANCE:
        raise FamilyFailed(f"the merged model gives other numbers, by {found.merged_difference} nats")


@contextmanager
def _running(folder: Path, plane: ControlPlane) -> Iterator[Replica]:
    folder.mkdir()
    replica = Replica(folder, plane)
    try:
        yield replica
    finally:
        replica.stop()
        plane.close()


def _plain(base: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype=torch.bfloat16)


def _probe(adapter: Path) -> ParityProbe:
    return msgspec.json.decode((adapter / PARITY_FILE).read_bytes(), type=ParityProbe)


def _difference(scores: Sequence[Sequence[float]], probe: ParityProbe) -> float:
    pairs = [(a, b) for seen, row in zip(scores, probe.rows, strict=True) for a, b in zip(seen, row.tuned, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "manifest.json"}
