"""The cost of the job and of the answers, beside the quote."""

from collections.abc import Iterator
from decimal import Decimal

from openai.types.fine_tuning import FineTuningJob

from demo.main_job.answers import Billing, JobEstimate, JobMembers
from demo.main_job.platform import Platform, extra
from demo.main_job.stages import Stage, until


def show_bill(platform: Platform, stage: Stage, job: FineTuningJob) -> dict[str, object]:
    """Wait until every request is rated, then show what was charged and that the books balance."""

    def fetch() -> Billing | None:
        bill = platform.get("/billing", Billing)
        return None if bill.unrated_requests else bill

    hint = "Some requests are not charged yet. The process celery does that."
    bill = until(fetch, lambda: hint, platform, stage, "bill", process="celery")
    for line in bill_lines(extra(job, JobMembers), bill):
        stage.line(*line)
    return {"tokens_billed": bill.tokens_billed, "ledger_sum_nano": bill.ledger_sum_nano}


def bill_lines(job: JobMembers, bill: Billing) -> Iterator[tuple[str, str]]:
    """Yield lines with the cost of the job, the cost of all inference, and the remaining balance."""
    spent, cap = Decimal(job.cost_usd), Decimal(job.spend_cap_usd or 0)
    quote = job.estimate or JobEstimate()
    low, middle, high = quote.train_seconds_p10, quote.train_seconds_p50, quote.train_seconds_p90
    if low is not None and middle is not None and high is not None:
        yield "quote", f"training was quoted at {middle:.0f} s ({low:.0f} to {high:.0f} s)"
    returned = f"${cap - spent:.4f} of the ${cap:.2f} set aside returned"
    yield "bill", f"the job is billed {job.billed_gpu_seconds:.1f} s = ${spent:.4f}; {returned}"
    yield "", f"all inference so far: {bill.tokens_billed:,} tokens = ${Decimal(bill.inference_usd):.4f}"
    balance, held = Decimal(bill.available_usd), Decimal(bill.held_usd)
    books = f"all ledger entries add up to {bill.ledger_sum_nano}, as they must"
    yield "", f"balance ${balance:.4f}, held ${held:.4f}; {books}"
