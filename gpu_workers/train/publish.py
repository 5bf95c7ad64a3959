"""`python -m gpu_workers.train.publish SPEC WORK_DIR`: what follows training, from the exported files alone.

Loads the 16-bit base, then the exported adapter, as serving will; compares the two on held-out rows, writes the probe
of the parity certificate into the adapter's folder, and merges where asked to. A process of its own: its failure costs
a report, never the adapter. Free of charge.
"""

import importlib.metadata
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import peft
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from apps.contracts.adapter_files import WEIGHTS_FILE
from apps.contracts.chat import ChatRenderer
from apps.contracts.evaluation import EvaluationPlan, EvaluationReport, GraderKind
from apps.contracts.parity import PARITY_FILE, ParityProbe
from apps.contracts.runs import Manifest, Objective, RunSpec
from gpu_workers.artifacts import folder_bytes, read_manifest, seal_folder
from gpu_workers.events import ADAPTER_FOLDER, TRAINING_FILE, replace_file
from gpu_workers.publishing import (
    GGUF_EXPORT,
    MERGED_EXPORT,
    PUBLISHED_FILE,
    PUBLISHED_FOLDER,
    Published,
    PublishSecrets,
    SealedFolder,
)
from gpu_workers.train.comparison import Examiner
from gpu_workers.train.data import load_renderer
from gpu_workers.train.gguf import NotConverted, convert_model
from gpu_workers.train.judging import Judge
from gpu_workers.train.merge import merge_adapter
from gpu_workers.train.model import fetch_base_model
from gpu_workers.train.probe_rows import build_probe, choose_rows, first_chat, score_rows
from gpu_workers.train.rows import Pairs, encode
from gpu_workers.train.scoring import Example, as_example
from gpu_workers.train.selection import select_rows

MERGED_FOLDER, GGUF_FOLDER = "merged", "gguf"
_PARITY_ROWS = 64
NO_SECRETS = PublishSecrets()

log = logging.getLogger("gpu_workers.train.publish")


def main(spec_path: Path, work_dir: Path) -> int:
    """Write `published.json`; returns the exit code."""
    secrets = msgspec.json.decode(sys.stdin.buffer.readline() or b"{}", type=PublishSecrets)
    spec = msgspec.json.decode(spec_path.read_bytes(), type=RunSpec)
    base = fetch_base_model(spec.base_model, hub_token=secrets.hub_token)
    published = publish(work_dir, spec, base, secrets=secrets)
    replace_file(work_dir / PUBLISHED_FILE, msgspec.json.encode(published))
    return 0


def publish(work_dir: Path, spec: RunSpec, base: Path, *, secrets: PublishSecrets = NO_SECRETS) -> Published:
    """Seal the adapter's folder anew with what was found out; return where everything lies."""
    trained = work_dir / ADAPTER_FOLDER
    report, probe = _look(work_dir, spec, base, trained, secrets)
    temporary = work_dir / f"tmp-{PUBLISHED_FOLDER}"
    _copy(trained, temporary)
    if probe is not None:
        (temporary / PARITY_FILE).write_bytes(msgspec.json.encode(probe))
    manifest = read_manifest(trained)
    sealed = _seal(temporary, work_dir / PUBLISHED_FOLDER, manifest, kind=manifest.kind)
    # What the engine cannot load as an adapter is delivered as a whole model.
    is_merged = _is_adapter(trained) and (MERGED_EXPORT in spec.exports or not spec.hyperparameters.is_servable)
    is_converted = GGUF_EXPORT in spec.exports
    merged = _merge(work_dir, base, manifest) if _is_adapter(trained) and (is_merged or is_converted) else None
    gguf, notes = None, []
    if is_converted:
        try:
            gguf = _convert(work_dir, work_dir / merged.folder if merged else trained, manifest)
        except NotConverted as reason:
            notes.append(f"There is no GGUF of the result: {reason}.")
    return Published(adapter=sealed, merged=merged if is_merged else None, gguf=gguf, report=report, notes=tuple(notes))


def _look(
    work_dir: Path, spec: RunSpec, base: Path, trained: Path, secrets: PublishSecrets
) -> tuple[EvaluationReport | None, ParityProbe | None]:
    """Ask the base first and the tuned model next, so that one of them at a time is in memory."""
    renderer = load_renderer(base, spec.base_model.chat_template)
    chosen = select_rows(work_dir, spec)
    held_out = (
        _examples(work_dir / chosen.validation_file, spec, renderer, chosen.validation)
        if chosen.validation_file
        else []
    )
    has_probe = _is_adapter(trained) and spec.hyperparameters.is_servable
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    config = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    rows = held_out or (_examples(work_dir / TRAINING_FILE, spec, renderer, chosen.training) if has_probe else [])
    fixed = choose_rows(rows[:_PARITY_ROWS], context_length=_context_length(config)) if has_probe else []
    plan = spec.evaluation or EvaluationPlan()
    examiner = Examiner(held_out, plan, tokenizer, pad_id=_pad_id(config)) if held_out else None
    model = _load(base)
    before = examiner.examine(model) if examiner else None
    base_scores = score_rows(model, fixed)
    model = _tuned(model, trained)
    after = examiner.examine(model) if examiner else None
    tuned_scores = score_rows(model, fixed)
    report = examiner.report(before, after, judge=_judge(plan, secrets)) if examiner and before and after else None
    if not fixed:
        return report, None
    is_chat = spec.hyperparameters.objective is Objective.SUPERVISED
    probe = build_probe(
        fixed,
        base=base_scores,
        tuned=tuned_scores,
        chat=first_chat(work_dir / TRAINING_FILE, renderer, tokenizer) if is_chat else None,
        chat_template=renderer.chat_template,
        dtype=_dtype(),
    )
    return report, probe


def _judge(plan: EvaluationPlan, secrets: PublishSecrets) -> Judge | None:
    if plan.grader.kind is not GraderKind.JUDGE:
        return None
    return Judge(plan.grader, secrets.judge, seconds=plan.judge_seconds, refusal=secrets.judge_refusal)


def _examples(path: Path, spec: RunSpec, renderer: ChatRenderer, keep: Sequence[bool] | None) -> list[Example]:
    recipe = spec.hyperparameters
    rows = encode(path, renderer, recipe, keep=keep)
    if isinstance(rows, Pairs):
        return [_preferred(item) for item in rows.items(range(len(rows)))]
    is_chat = recipe.objective is Objective.SUPERVISED
    return [as_example(rows.input_ids[i], rows.labels[i], can_be_asked=is_chat) for i in range(len(rows))]


def _preferred(pair: dict[str, Any]) -> Example:
    """Of a preference row the preferred answer is what should become likelier."""
    prompt, chosen = list(pair["prompt_ids"]), list(pair["chosen_ids"])
    return as_example(prompt + chosen, [-100] * len(prompt) + chosen, can_be_asked=True)


def _load(folder: Path) -> Any:
    """Return a model as it is served: 16 bits, dense, on the accelerator where there is one and it fits."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=_dtype()
    )
    return model.to(_device(model)).eval()


def _device(model: Any) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    free, _ = torch.cuda.mem_get_info()
    return torch.device("cuda" if model.get_memory_footprint() * 1.3 < free else "cpu")


def _dtype() -> torch.dtype:
    return torch.bfloat16


def _tuned(model: Any, trained: Path) -> Any:
    if not _is_adapter(trained):
        return _load(trained)
    adapted = peft.PeftModel.from_pretrained(model, trained, autocast_adapter_dtype=False)
    return adapted.to(model.device, _dtype()).eval()


def _is_adapter(trained: Path) -> bool:
    return (trained / WEIGHTS_FILE).is_file()


def _context_length(config: Any) -> int:
    return int(getattr(config.get_text_config(), "max_position_embeddings", 2_048))


def _pad_id(config: Any) -> int:
    """Any id will do: padding is masked."""
    text = config.get_text_config()
    return text.pad_token_id if isinstance(getattr(text, "pad_token_id", None), int) else 0


def _merge(work_dir: Path, base: Path, manifest: Manifest) -> SealedFolder:
    temporary = work_dir / f"tmp-{MERGED_FOLDER}"
    shutil.rmtree(temporary, ignore_errors=True)
    merge_adapter(base, work_dir / ADAPTER_FOLDER, temporary)
    return _seal(temporary, work_dir / MERGED_FOLDER, manifest, kind="model")


def _convert(work_dir: Path, model: Path, manifest: Manifest) -> SealedFolder:
    temporary = work_dir / f"tmp-{GGUF_FOLDER}"
    shutil.rmtree(temporary, ignore_errors=True)
    convert_model(model, temporary, threads=torch.get_num_threads())
    return _seal(temporary, work_dir / GGUF_FOLDER, manifest, kind="model")


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in read_manifest(source).files:
        os.link(source / file.name, target / file.name)


def _seal(temporary: Path, final: Path, manifest: Manifest, *, kind: str) -> SealedFolder:
    metadata = manifest.metadata | {
        name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "trl", "safetensors")
    }
    digest = seal_folder(
        temporary,
        final,
        lambda files: msgspec.structs.replace(manifest, kind=kind, files=files, metadata=metadata),
    )
    return SealedFolder(folder=final.name, manifest_sha256=digest, bytes=folder_bytes(read_manifest(final)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    torch.set_num_interop_threads(1)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
