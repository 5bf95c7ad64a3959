"""The usual way, for comparison: `datasets.load_dataset` and a batched `map` with the model's chat template.

Run with the engines' Python: `rival.py rows.jsonl MODEL_FOLDER`; prints one JSON object.
"""

import json
import resource
import sys
import time
from typing import Any

import datasets
from transformers import AutoTokenizer

file, model = sys.argv[1:]
datasets.disable_progress_bars()
tokenizer = AutoTokenizer.from_pretrained(model)


def tokenise(batch: dict[str, Any]) -> dict[str, Any]:
    texts = tokenizer.apply_chat_template(batch["messages"], tokenize=False)
    return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


started, cpu_started = time.perf_counter(), cpu_seconds()
rows = datasets.load_dataset("json", data_files=file, split="train")
mapped = rows.map(tokenise, batched=True, remove_columns=rows.column_names)
seen = {
    "seconds": time.perf_counter() - started,
    "cpu_seconds": cpu_seconds() - cpu_started,
    "rows": len(mapped),
    "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}
sys.stdout.write(json.dumps(seen) + "\n")
