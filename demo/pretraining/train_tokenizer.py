"""Train the byte-level BPE tokenizer on the committed corpus and write it with its chat template."""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
VOCABULARY = 6144
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
# One piece per word with its leading space or underscore; numbers are split into single digits.
PIECES = r"[ _]?\p{L}+|'\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|_+|\s+"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('Only the roles system, user and assistant are supported') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def read_corpus(path: Path = HERE / "corpus.jsonl.xz") -> tuple[list[dict[str, Any]], str]:
    """Return the corpus records and the SHA-256 of the uncompressed corpus."""
    data = lzma.decompress(path.read_bytes())
    return [json.loads(line) for line in data.splitlines()], hashlib.sha256(data).hexdigest()


def record_lines(record: dict[str, Any]) -> list[str]:
    """Return the passages of a record without role markers."""
    if "text" in record:
        return [record["text"]]
    return [message["content"] for message in record["messages"]]


def train(lines: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer with its special tokens and chat template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    records, digest = read_corpus()
    lines = [line for record in records for line in record_lines(record)]
    wrap(train(lines)).save_pretrained(options.out)
    (options.out / "corpus.sha256").write_text(digest + "\n")


if __name__ == "__main__":
    main()
