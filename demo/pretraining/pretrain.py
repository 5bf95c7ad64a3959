"""Pre-train the demo base model on one CPU thread: Muon for matrices, AdamW for the rest, WSD schedule."""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_tokenizer import read_corpus
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger("pretrain")

# Sources that read like customer requests or payment documentation are repeated in the final phase.
FINAL_SOURCES = frozenset(
    {
        "chitchat-dataset",
        "chatterbot-corpus",
        "home-assistant-intents",
        "stripe",
        "lithic",
        "increase",
        "modern-treasury",
        "squareup",
        "wise-sdk",
        "plaid-python",
        "orb-billing",
        "gocardless-pro",
        "braintree",
        "checkout-sdk",
        "razorpay",
        "mollie-api-python",
        "lago-python-client",
        "coinbase-advanced-py",
        "azure-mgmt-billing",
        "shippo",
    }
)

# A few chats get a system turn so that its token is trained too.
SYSTEM_SHARE = 0.05
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Be brief and friendly.",
    "Answer the user.",
    "You help customers of a small company.",
    "Reply with one short message.",
)


@dataclass
class Settings:
    """All settings that affect the outcome of a run."""

    seed: int = 20261121
    minutes: float = 60.0
    decay_fraction: float = 0.25
    warmup_steps: int = 60
    batch_tokens: int = 4096
    micro_tokens: int = 1024
    stable_length: int = 128
    decay_length: int = 256
    matrix_lr: float = 4e-3
    other_lr: float = 3e-3
    matrix_decay: float = 0.1
    hidden_size: int = 256
    layers: int = 6
    heads: int = 4
    intermediate_size: int = 704
    checkpoint_minutes: float = 4.0


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Create an untrained Llama model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.hidden_size // settings.heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",
    )
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.02 / (2 * settings.layers) ** 0.5)
    return model


def encode(records: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Encode records in the chat format; every document ends with the end token."""
    rng = random.Random(len(records))
    texts = []
    for record in records:
        if "text" in record:
            texts.append(record["text"] + tokenizer.eos_token)
            continue
        system = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < SYSTEM_SHARE else []
        texts.append(tokenizer.apply_chat_template(system + record["messages"], tokenize=False))
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def blocks(documents: list[list[int]], length: int, rng: random.Random) -> Iterator[Tensor]:
    """Yield blocks of packed documents without end, in a new order every epoch."""
    while True:
        order = list(range(len(documents)))
        rng.shuffle(order)
        stream = torch.tensor([token for index in order for token in documents[index]])
        count = len(stream) // length
        yield from stream[: count * length].view(count, length)


def optimizers(model: LlamaForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Return Muon for the projection matrices and AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    muon = torch.optim.Muon(
        matrices, lr=settings.matrix_lr, weight_decay=settings.matrix_decay, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=settings.other_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [muon, adamw]


def schedule(step: int, elapsed: float, settings: Settings) -> float:
    """Return the learning-rate factor: warm-up over steps, stable, then linear decay over the budget's last part."""
    start = 60 * settings.minutes * (1 - settings.decay_fraction)
    decay = 1.0 - max(0.0, elapsed - start) / (60 * settings.minutes - start)
    return min(1.0, (step + 1) / settings.warmup_steps) * max(0.01, decay)


def batch_loss(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Return the mean next-token loss of a batch of packed blocks."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, held_out: list[Tensor]) -> float:
    """Return the mean loss on held-out blocks."""
    return sum(batch_loss(model, batch).item() for batch in held_out) / len(held_out)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a bfloat16 copy in the Hugging Face layout."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Run:
    """One pre-training run with its data, optimizers, log and checkpoints."""

    def __init__(self, settings: Settings, tokenizer_dir: Path, out: Path) -> None:
        self.settings, self.out = settings, out
        out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        records, self.digest = read_corpus()
        documents = encode(records, self.tokenizer)
        self.documents = documents[2000:]
        self.final = self.documents + [
            ids
            for ids, record in zip(self.documents, records[2000:], strict=True)
            if record["source"] in FINAL_SOURCES or record["source"].startswith("ovos")
        ]
        self.held_out = self._held_out(documents[:2000])
        self.model = build_model(settings, self.tokenizer)
        self.optimizers = optimizers(self.model, settings)
        self.loss = torch.compile(batch_loss, dynamic=False)
        self.rng = random.Random(settings.seed)
        self.tokens = self.step = 0
        count = sum(p.numel() for p in self.model.parameters())
        log.info("parameters=%d tokens per epoch=%d", count, sum(map(len, self.documents)))

    def _held_out(self, documents: list[list[int]]) -> list[Tensor]:
        stream = blocks(documents, self.settings.stable_length, random.Random(0))
        return [torch.stack([next(stream) for _ in range(8)]) for _ in range(24)]

    def update(self, stream: Iterator[Tensor], length: int, factor: float) -> float:
        """Take one optimizer step and return its training loss."""
        parts = self.settings.batch_tokens // self.settings.micro_tokens
        total = 0.0
        for _ in range(parts):
            batch = torch.stack([next(stream) for _ in range(self.settings.micro_tokens // length)])
            loss = self.loss(self.model, batch) / parts
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
        self.tokens += self.settings.batch_tokens
        self.step += 1
        return total

    def record(self, elapsed: float, loss: float, held_out: float | None) -> None:
        """Append one line to loss.csv."""
        path = self.out / "loss.csv"
        if not path.exists():
            path.write_text("step,tokens,seconds,train_loss,held_out_loss\n")
        with path.open("a") as handle:
            handle.write(
                f"{self.step},{self.tokens},{elapsed:.0f},{loss:.4f},{'' if held_out is None else f'{held_out:.4f}'}\n"
            )

    def checkpoint(self, name: str) -> None:
        """Save the current weights and the facts about them."""
        save(self.model, self.tokenizer, self.out / name)
        facts = {"corpus_sha256": self.digest, "tokens": self.tokens, "steps": self.step, **asdict(self.settings)}
        (self.out / name / "training.json").write_text(json.dumps(facts, indent=1) + "\n")

    def train(self) -> None:
        """Train until the time budget is used."""
        settings, start = self.settings, time.monotonic()
        budget, saved = 60 * settings.minutes, 0.0
        stable = blocks(self.documents, settings.stable_length, self.rng)
        final = blocks(self.final, settings.decay_length, self.rng)
        while (elapsed := time.monotonic() - start) < budget:
            decaying = elapsed > budget * (1 - settings.decay_fraction)
            stream, length = (final, settings.decay_length) if decaying else (stable, settings.stable_length)
            loss = self.update(stream, length, schedule(self.step, elapsed, settings))
            if self.step % 20 == 0:
                held_out = evaluate(self.model, self.held_out) if self.step % 200 == 0 else None
                self.record(elapsed, loss, held_out)
                log.info(
                    "step=%d tokens=%d seconds=%.0f loss=%.4f held_out=%s",
                    self.step,
                    self.tokens,
                    elapsed,
                    loss,
                    held_out,
                )
            if elapsed - saved > 60 * settings.checkpoint_minutes:
                saved = elapsed
                self.checkpoint(f"step{self.step}")
        self.record(time.monotonic() - start, loss, evaluate(self.model, self.held_out))
        self.checkpoint("final")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="override settings")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    overrides = {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.set)}
    Run(Settings(**overrides), options.tokenizer, options.out).train()


if __name__ == "__main__":
    main()
