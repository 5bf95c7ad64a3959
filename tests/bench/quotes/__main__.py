"""How many distinct quotes one core gives in a second, placement search included: `make bench-quotes`.

Every quote asks for another recipe, model, method, pool and number of GPUs, so that nothing could be kept between them
(and nothing is: the estimator has no cache). Counted is CPU time, for other processes share the machine. Last line:
JSON.
"""

import itertools
import sys
import time

import msgspec

from apps.estimates.physics import gpus
from apps.estimates.published import sources
from apps.estimates.quote import PoolFacts, QuoteRequest, quote
from tests.bench.estimates.scored_rows import DATA

WANTED_PER_SECOND = 2000
MODELS = ("Llama-3.1-8B", "Qwen2.5-7B", "Qwen2.5-32B", "Llama-3.1-70B", "Mixtral-8x7B-v0.1")
CARDS = ("l40s-48", "a100-sxm-80", "h100-sxm-80", "h200-sxm-141", "b200-sxm-180", "rtx-4090")
METHODS, COUNTS, RANKS = ("lora", "qlora", "full"), (1, 2, 4, 8), (8, 16, 32, 64)
QUOTES = 6000


def main() -> None:
    models, types = sources.load_architectures(DATA), gpus.load(DATA / "gpus.json")
    names = [name for name in MODELS if name in models]
    pools = [PoolFacts(gpu=types[card], price_nano=2_000_000_000, live_workers=1, gpus_per_worker=8) for card in CARDS]
    cases = itertools.islice(itertools.cycle(itertools.product(names, METHODS, pools, COUNTS, RANKS)), QUOTES)
    asked = [
        (_request(models[name], method, rank, index), pool, count)
        for index, (name, method, pool, count, rank) in enumerate(cases)
    ]
    started, fitting = time.process_time(), 0
    for request, pool, count in asked:
        fitting += quote(request=request, pool=pool, gpu_count=count).fits
    seconds = time.process_time() - started
    result = {
        "quotes": len(asked), "fitting": fitting, "cpu_seconds": round(seconds, 3),
        "quotes_per_second": round(len(asked) / seconds), "wanted_per_second": WANTED_PER_SECOND,
    }  # fmt: skip
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    if result["quotes_per_second"] < WANTED_PER_SECOND:
        sys.exit(1)


def _request(architecture: object, method: str, rank: int, index: int) -> QuoteRequest:
    longest = 1024 + index % 3000
    return QuoteRequest(
        architecture=architecture,  # type: ignore[arg-type]
        method=method, max_length=longest, batch_size=32, epochs=1 + index % 3, rows=5000 + index,
        tokens=(5000 + index) * longest // 3, trained_tokens=5000 * longest // 6, longest_row_tokens=longest,
        lora_rank=rank,
    )  # fmt: skip


if __name__ == "__main__":
    main()
