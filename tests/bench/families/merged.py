"""A merged model in vLLM without adapters, within one forked process: a start without imports."""

import os
from collections.abc import Sequence
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams


def score_merged(folder: Path, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """Return the log-probability of every token but the first. To be called in a process that ends afterwards."""
    engine = LLM(
        str(folder), enforce_eager=True, max_model_len=512, max_num_seqs=8, disable_log_stats=True, dtype="bfloat16"
    )
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    answers = engine.generate([{"prompt_token_ids": list(row)} for row in rows], asked, use_tqdm=False)
    return [
        tuple(entry[token].logprob for token, entry in zip(row[1:], answer.prompt_logprobs[1:], strict=True))
        for row, answer in zip(rows, answers, strict=True)
    ]
