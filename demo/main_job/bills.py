"""The cost of the job and of the answers, beside the quote."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from demo.main_job.platform import Platform, extra
from demo.main_job.stages import Stage, until


def show_bill(platform: Platform, stage: Stage, job: Any) -> dict[str, Any]:
    """Wait until every request is rated, then show what was charged and that the books balance."""

    def look() -> dict[str, Any] | None:
        bill: dict[str, Any] = platform.get("/billing")
        return None if bill["unrated_requests"] else bill

    hint = "Some requests are not charged yet. The process celery does that."
    bill = until(look, lambda: hint, platform, stage, "bill", process="celery")
    for line in bill_lines(extra(job), bill):
        stage.line(*line)
    return {name: bill[name] for name in ("tokens_billed", "ledger_sum_nano")}


def bill_lines(job: dict[str, Any], bill: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield lines with the cost of the job, the cost of all inference, and the remaining balance."""
    spent, cap = Decimal(job["cost_usd"]), Decimal(job["spend_cap_usd"])
    quote = job["estimate"] or {}
    if quote.get("train_seconds_p50") is not None:
        low, middle, high = (quote[f"train_seconds_{name}"] for name in ("p10", "p50", "p90"))
        yield "quote", f"training was quoted at {middle:.0f} s ({low:.0f} to {high:.0f} s)"
    returned = f"${cap - spent:.4f} of the ${cap:.2f} set aside returned"
    yield "bill", f"the job is billed {job['billed_gpu_seconds']:.1f} s = ${spent:.4f}; {returned}"
    yield "", f"all inference so far: {bill['tokens_billed']:,} tokens = ${Decimal(bill['inference_usd']):.4f}"
    balance, held = (Decimal(bill[name]) for name in ("available_usd", "held_usd"))
    books = f"all ledger entries add up to {bill['ledger_sum_nano']}, as they must"
    yield "", f"balance ${balance:.4f}, held ${held:.4f}; {books}"
