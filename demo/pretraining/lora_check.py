"""Fine-tune the base model on Banking77 with LoRA or QLoRA and measure greedy exact-match accuracy.

Hyper-parameters are tuned with `--split tune`, which holds out 1,000 training rows; `--split test` trains on all
training rows and scores a seeded sample of the test rows.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from decontaminate import read_rows
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast

HERE = Path(__file__).parent
DATA = HERE.parent / "banking77"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MAX_NEW_TOKENS = 24

log = logging.getLogger("lora_check")
Row = tuple[str, str]


def load_model(folder: Path, method: str) -> torch.nn.Module:
    """Load the base model, in NF4 for QLoRA."""
    if method == "qlora":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Encode one user message with the generation prompt."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


def examples(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer) token lists; the answer ends with the end token."""
    answers = {label: tokenizer(label)["input_ids"] + [tokenizer.eos_token_id] for _, label in rows}
    return [(prompt_ids(tokenizer, text), answers[label]) for text, label in rows]


def batches(
    data: list[tuple[list[int], list[int]]], size: int, pad: int, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield length-grouped batches of (input_ids, labels) in random order."""
    order = list(range(len(data)))
    rng.shuffle(order)
    pool = 32 * size
    chunks = []
    for start in range(0, len(order), pool):
        part = sorted(order[start : start + pool], key=lambda index: len(data[index][0]) + len(data[index][1]))
        chunks += [part[i : i + size] for i in range(0, len(part), size)]
    rng.shuffle(chunks)
    for chunk in chunks:
        width = max(len(data[i][0]) + len(data[i][1]) for i in chunk)
        ids = torch.full((len(chunk), width), pad)
        labels = torch.full((len(chunk), width), -100)
        for row, index in enumerate(chunk):
            prompt, answer = data[index]
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        yield ids, labels


def factor(step: int, total: int, warmup: int, kind: str) -> float:
    """Return the learning-rate factor: linear warm-up, then linear, cosine or constant."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    return {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "constant": 1.0}[kind]


def train(model: torch.nn.Module, data: list[Any], options: argparse.Namespace, pad: int) -> tuple[float, float]:
    """Train the adapter and return the wall-clock and processor seconds it took."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.0)
    per_epoch = math.ceil(len(data) / options.batch)
    total = per_epoch * options.epochs
    rng, step, start, used = random.Random(options.seed), 0, time.monotonic(), time.process_time()
    model.train()
    for epoch in range(options.epochs):
        losses = []
        for ids, labels in batches(data, options.batch, pad, rng):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=ids, attention_mask=(ids != pad).long(), use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = options.lr * factor(step, total, int(options.warmup * total), options.scheduler)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
        log.info("epoch=%d loss=%.4f seconds=%.0f", epoch + 1, sum(losses) / len(losses), time.monotonic() - start)
    return time.monotonic() - start, time.process_time() - used


@torch.no_grad()
def accuracy(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> float:
    """Return the exact-match accuracy of plain greedy decoding."""
    model.eval()
    rows = sorted(rows, key=lambda row: len(row[0]))
    right = 0
    for start in range(0, len(rows), 50):
        part = rows[start : start + 50]
        prompts = [prompt_ids(tokenizer, text) for text, _ in part]
        width = max(map(len, prompts))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        right += sum(answer == label for answer, (_, label) in zip(answers, part, strict=True))
    return right / len(rows)


def split_rows(split: str, limit: int) -> tuple[list[Row], list[Row]]:
    """Return (training, scoring) rows of the chosen split."""
    rows = read_rows(DATA / "train.csv")
    if split == "tune":
        random.Random(77).shuffle(rows)
        return rows[1000:], rows[:limit]
    test = read_rows(DATA / "test.csv")
    random.Random(77).shuffle(test)
    return rows, test[:limit]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE.parent / "base_model")
    parser.add_argument("--method", choices=["base", "lora", "qlora"], default="lora")
    parser.add_argument("--split", choices=["tune", "test"], default="tune")
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--alpha", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--warmup", type=float, default=0.05)
    parser.add_argument("--scheduler", choices=["linear", "cosine", "constant"], default="linear")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = load_model(options.model, options.method)
    rows, scoring = split_rows(options.split, options.limit)
    seconds = cpu = 0.0
    if options.method != "base":
        config = LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            target_modules=TARGETS,
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, config)
        seconds, cpu = train(model, examples(tokenizer, rows), options, tokenizer.pad_token_id)
    result = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    result |= {
        "train_seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "accuracy": accuracy(model, tokenizer, scoring),
    }
    if options.save:
        model.save_pretrained(options.save)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
