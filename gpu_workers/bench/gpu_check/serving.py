"""The check of vLLM: one engine answers with sixteen adapters at once, and their certificates hold.

The model has a true shape and random weights. PEFT scores a row with each adapter, as the trainer does, and the engine
must give the same log-probabilities.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from apps.contracts.parity import EngineScores, ParityProbe, ParityRow, compare, problem_of
from gpu_workers.bench import made_up
from gpu_workers.bench.calibrate import SHAPES
from gpu_workers.bench.gpu_check.findings import Finding, Verdict
from gpu_workers.train.after.scoring import token_logprobs

ADAPTERS = 16
_RANK, _ROW_TOKENS, _NEW_TOKENS = 16, 48, 32
_SIZE = 0.05  # of the adapters' numbers: large enough to change the answers of random weights
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_MEMORY_SHARE = 0.6


def check_vllm(folder: Path) -> Finding:
    return serve(folder, shape="llama-3.2-1b", adapters=ADAPTERS)


def serve(folder: Path, *, shape: str, adapters: int) -> Finding:
    """Serve a model of this shape with adapters of random numbers, and compare each with PEFT."""
    config = SHAPES[shape] | {"max_position_embeddings": 512}
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(2, int(config["vocab_size"]), (_ROW_TOKENS,), generator=generator).tolist()
    base, tuned = _write_and_score(folder, config, row, adapters)
    scores, seconds = _ask_engine(folder, row, adapters)
    problems = []
    for number in range(adapters):
        probe = ParityProbe(rows=(ParityRow(token_ids=tuple(row), tuned=tuned[number], base=base),))
        seen = EngineScores(tuned=scores[number + 1], base=scores[0])
        result = compare(probe, [seen], is_template_equal=None, engine="vllm")
        if problem := problem_of(result):
            problems.append(f"Adapter {number + 1}: {problem}")
    rate = adapters * _NEW_TOKENS / seconds
    figures = {"adapters": adapters, "certified": adapters - len(problems), "tokens_per_second": round(rate, 1)}
    if problems:
        advice = "Adapters would not be released on this machine: compare vLLM's version with the lock."
        said = f"{len(problems)} of {adapters} certificates do not hold. {problems[0]}"
        return Finding(verdict=Verdict.FAILED, said=said, advice=advice, figures=figures)
    said = f"{adapters} adapters answer at once with {rate:,.0f} tokens/s, and every certificate holds."
    return Finding(verdict=Verdict.PASSED, said=said, figures=figures)


def _write_and_score(
    folder: Path, config: Mapping[str, object], row: Sequence[int], adapters: int
) -> tuple[tuple[float, ...], list[tuple[float, ...]]]:
    """Write the model and its adapters; return PEFT's log-probabilities of the row, without and with each adapter."""
    torch.manual_seed(0)
    model_folder = made_up.write_folder(folder / "model", config)
    hf_config = AutoConfig.from_pretrained(model_folder, local_files_only=True, trust_remote_code=False)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16, trust_remote_code=False).eval()
    model.save_pretrained(model_folder)
    base = token_logprobs(model, row)
    lora = peft.LoraConfig(r=_RANK, lora_alpha=_RANK, target_modules=list(_MODULES), task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    tuned = []
    for number in range(adapters):
        for parameter in (each for name, each in adapted.named_parameters() if "lora_" in name):
            torch.nn.init.normal_(parameter.data, std=_SIZE)
        adapted.save_pretrained(folder / f"adapter-{number + 1}")
        tuned.append(token_logprobs(adapted, row))
    return base, tuned


def _ask_engine(folder: Path, row: Sequence[int], adapters: int) -> tuple[list[tuple[float, ...]], float]:
    """Return the engine's log-probabilities of the row, without and with each adapter, and the seconds of all answers.

    The engine runs in this process, because the runner's environment demands it. So nothing of it is left if the check
    is ended.
    """
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - its import takes seconds
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.empty_cache()
    engine = LLM(
        str(folder / "model"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enable_lora=True,
        lora_target_modules=list(_MODULES),  # with the head among them, vLLM scores no prompts
        max_loras=adapters,
        max_lora_rank=_RANK,
        max_model_len=256,
        max_num_seqs=adapters + 1,
        enforce_eager=True,  # a check needs no compiled graphs
        gpu_memory_utilization=_MEMORY_SHARE,
        kv_cache_memory_bytes=None if has_gpu else 64 * 2**20,
    )
    wanted = SamplingParams(
        max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True, prompt_logprobs=0, detokenize=False
    )
    places = [folder / f"adapter-{number + 1}" for number in range(adapters)]
    loaded = [LoRARequest(place.name, number + 1, str(place)) for number, place in enumerate(places)]
    prompts = [{"prompt_token_ids": list(row)} for _ in range(adapters + 1)]
    engine.generate(prompts, wanted, lora_request=[None, *loaded], use_tqdm=False)  # loads the adapters
    begun = time.perf_counter()
    answers = engine.generate(prompts, wanted, lora_request=[None, *loaded], use_tqdm=False)
    seconds = time.perf_counter() - begun
    return [_logprobs(answer.prompt_logprobs, row) for answer in answers], seconds


def _logprobs(found: Sequence[Mapping[int, Any] | None], row: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probability of every token but the first."""
    return tuple(each[token].logprob for each, token in zip(found[1:], row[1:], strict=True) if each)
