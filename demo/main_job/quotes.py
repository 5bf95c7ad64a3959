"""The estimate of a job, and the reasons why the pool cannot start one now."""

import openai

from demo.main_job.answers import PoolQuote, Quotes
from demo.main_job.platform import Platform
from demo.main_job.stages import Stage, until


def wait_for_quote(platform: Platform, stage: Stage, file_id: str, *, quantization: str | None) -> PoolQuote:
    """Print the estimate for each pool, and return that of the pool that trains here."""
    body: dict[str, object] = {
        "model": platform.account["base_model"], "training_file": file_id, "quantization": quantization,
    }  # fmt: skip

    def fetch() -> Quotes | None:
        answer = platform.post("/estimates", body, Quotes)
        return answer if any(pool.is_launchable for pool in _own_pools(platform, answer)) else None

    answer = until(fetch, lambda: trainer_hint(platform, file_id), platform, stage, "estimate", process="trainer")
    stage.mark(f"wait_for_quote{'_' + quantization if quantization else ''}")
    recipe = answer.recipe
    epochs = "1 epoch" if recipe.epochs == 1 else f"{recipe.epochs} epochs"
    stage.line("estimate", f"for {answer.model}, {recipe.method}, {epochs}:")
    for pool in answer.pools:
        stage.line("", _pool_line(pool))
    return next(pool for pool in _own_pools(platform, answer) if pool.is_launchable)


def _own_pools(platform: Platform, answer: Quotes) -> list[PoolQuote]:
    return [pool for pool in answer.pools if pool.pool == platform.account["pool"]]


def _pool_line(pool: PoolQuote) -> str:
    estimate = pool.estimate
    memory = f"{estimate.peak_bytes / 2**30:5.1f} of {estimate.capacity_bytes / 2**30:5.1f} GiB"
    seconds, cost = estimate.train_seconds_p50, pool.cost_usd
    time_and_cost = "time not known   "
    if seconds is not None and cost.p10 is not None and cost.p50 is not None and cost.p90 is not None:
        time_and_cost = f"{seconds:6.0f} s  ${float(cost.p50):.4f} (${float(cost.p10):.4f} to ${float(cost.p90):.4f})"
    return f"{pool.gpu_type:<18} {memory}  {time_and_cost}  {pool.block_reason or 'ready'}"


def trainer_hint(platform: Platform, file_id: str) -> str:
    """Return a sentence that explains why the trainer starts nothing now, as far as the estimate knows."""
    return trainer_obstacle(platform, file_id) or "The trainer is online and busy."


def trainer_obstacle(platform: Platform, file_id: str) -> str:
    """Return why no job of the pool can start; empty if one could."""
    body: dict[str, object] = {"model": platform.account["base_model"], "training_file": file_id}
    try:
        pools = _own_pools(platform, platform.post("/estimates", body, Quotes))
    except openai.NotFoundError:  # the file of an earlier job was deleted
        return "The trainer has not taken it yet."
    if not any(pool.live_workers for pool in pools):
        return "No trainer has reported lately. The process trainer is missing, still starts or measures its speed."
    reason = pools[0].block_reason or ""
    if reason.startswith("No time estimate yet"):
        return "The trainer is online and measures its speed for the estimate, which takes about a minute."
    return f"The trainer is online and not ready: {reason.rstrip('.')}." if reason else ""
