"""`anneal estimate`: what a fine-tune would need, take and cost, without server, database or network."""

import argparse
import math

import msgspec

from apps.estimates.errors import EstimateError
from apps.estimates.fixes import Fix
from apps.estimates.machines import MAX_NODES, shared_evenly
from apps.estimates.physics.gpus import GIB, Gpu
from apps.estimates.physics.plans import parse_method
from apps.estimates.quote import PoolFacts, QuoteRequest, quote
from apps.interfaces.cli import catalog, output
from apps.interfaces.cli.answers import Answer, rank_answers
from apps.interfaces.cli.catalog import HourlyPrice, Model
from apps.interfaces.cli.errors import BadOption

# The estimator's field names -> the options they came from.
_OPTIONS = {
    "lora_rank": "--rank",
    "max_length": "--seq",
    "longest_row_tokens": "--seq",
    "batch_size": "--batch",
    "micro_batch_size": "--micro-batch",
    "cpu_offload": "--offload",
    "gpu_count": "--gpus",
    "price_nano": "--price",
}
# The most GPUs sold and rented in one machine. Grace-Blackwell racks join theirs in one NVLink domain.
_IN_ONE_MACHINE, _IN_ONE_RACK, _RACK_PREFIX = 8, 72, "gb"
_MAX_SUGGESTED_GPUS = 64
_MAX_DOLLARS = 1e6
_EXAMPLES = """examples:
  anneal estimate --model Llama-3.1-8B --method qlora --gpu h100 --tokens 10e6
  anneal estimate --model Qwen3-14B --gpu all --rows 20000 --seq 4096 --within 6
  anneal estimate --model ./config.json --method full --gpu h100 --gpus 1,2,4,8 --tokens 50e6 --price 2.69 --json
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "estimate",
        help="memory, time and cost of a fine-tune",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    job = parser.add_argument_group("the job")
    job.add_argument("--model", required=True, help="a name such as Llama-3.1-8B, or a config.json or its folder")
    job.add_argument("--method", default="lora", help="lora (default), rslora, dora, qlora, qdora, full")
    job.add_argument("--rank", type=_whole, default=16, help="LoRA rank (default 16)")
    job.add_argument("--targets", default="all-linear", help="adapted modules, separated by commas")
    job.add_argument("--seq", type=_whole, default=2048, help="longest row in tokens (default 2048)")
    job.add_argument("--batch", type=_whole, default=16, help="rows of an optimizer step (default 16)")
    job.add_argument("--micro-batch", type=_whole, help="rows at a time on one GPU (default: the most that fit)")
    job.add_argument("--epochs", type=_whole, default=1, help="default 1")
    job.add_argument("--tokens", type=_whole, help="tokens of one epoch; 10e6 is understood")
    job.add_argument("--trained-tokens", type=_whole, help="those of them that count toward the loss (default: all)")
    job.add_argument("--rows", type=_whole, help="rows of one epoch; without --tokens, each as long as --seq")
    job.add_argument("--packing", action="store_true", help="rows are packed, not padded")
    job.add_argument("--optimizer", default="adamw", help="adamw (default), adamw_8bit, adafactor, ...")
    job.add_argument("--offload", action="store_true", help="weights and optimizer state rest in the host's memory")
    job.add_argument("--preference", action="store_true", help="DPO: a row is two answers, each up to --seq")
    job.add_argument(
        "--no-reference", action="store_true", help="with --preference: ORPO, which compares with no model"
    )
    job.add_argument("--stack", default="anneal", help="whose training loop: anneal (default), hf, unsloth, ...")
    place = parser.add_argument_group("the place")
    place.add_argument("--gpu", required=True, help="a type such as h100 or l40s-48; all ranks every type")
    place.add_argument("--gpus", help="how many in all, such as 1 or 1,2,4,8 (default: one of each machine)")
    place.add_argument(
        "--nodes",
        type=_whole,
        help="machines that share the GPUs evenly, each GPU with the whole model, over 10 Gbit/s "
        "(default: as few as hold them, over InfiniBand)",
    )
    place.add_argument("--host-memory", type=_gib, help="GiB of the machine's own memory, which --offload needs")
    place.add_argument("--price", type=_dollars, help="dollars for an hour of one GPU (default: published prices)")
    place.add_argument("--spot", type=_rate, help="interruptions an hour of a spot GPU: adds the work they undo")
    place.add_argument("--within", type=_hours, help="hours until it is needed; decides what is recommended")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(given: argparse.Namespace) -> str:
    """Return the text to print. Raises BadOption naming the option at fault."""
    model = catalog.find_model(given.model)
    types, counts = catalog.find_gpus(given.gpu), _counts(given)
    request = _request(given, model)
    answers = [_answer(request, gpu, count, given) for gpu in types for count in counts]
    ranking = rank_answers(answers, within_hours=given.within)
    written = output.as_json if given.json else output.as_text
    text = written(model=model, request=request, answers=answers, ranking=ranking, within_hours=given.within)
    key, *others = catalog.matching(given.gpu)
    if others and given.gpu != catalog.ALL and not given.json:  # a short name could have meant them
        text += f"{given.gpu} is read as {key}; there is also {', '.join(others)}.\n"
    return text


def _request(given: argparse.Namespace, model: Model) -> QuoteRequest:
    tokens, rows = _tokens_and_rows(given)
    if given.no_reference and not given.preference:
        raise BadOption("--no-reference", "only a job on preferences has a reference: say --preference too")
    trained = tokens if given.trained_tokens is None else given.trained_tokens
    if trained < 1:
        raise BadOption("--trained-tokens", "a job that trains no token has nothing to estimate")
    try:
        method = parse_method(given.method)
        return QuoteRequest(
            architecture=model.architecture,
            method=method.method,
            use_dora=method.use_dora,
            use_rslora=method.use_rslora,
            max_length=given.seq,
            batch_size=given.batch,
            micro_batch_size=given.micro_batch,
            epochs=given.epochs,
            rows=rows,
            tokens=tokens,
            trained_tokens=trained,
            longest_row_tokens=max(given.seq, 1),
            lora_rank=given.rank,
            target_modules=tuple(name.strip() for name in given.targets.split(",") if name.strip()),
            optimizer=given.optimizer,
            packing=given.packing,
            cpu_offload=given.offload,
            is_preference=given.preference,
            has_reference=not given.no_reference,
            node_count=given.nodes or 1,
            stack=given.stack,
        )
    except EstimateError as error:
        raise _named(error) from error


def _tokens_and_rows(given: argparse.Namespace) -> tuple[int, int]:
    """Return tokens and rows; the missing one is computed from the other with rows as long as --seq."""
    if given.tokens is None and given.rows is None:
        raise BadOption("--tokens", "say how much there is to train: --tokens, --rows, or both")
    for option, value in (("--tokens", given.tokens), ("--rows", given.rows)):
        if value is not None and value < 1:
            raise BadOption(option, "a job without data has nothing to estimate")
    if given.seq < 1:
        raise BadOption("--seq", "must be at least 1")
    row = given.seq * (2 if given.preference else 1)
    tokens = given.tokens if given.tokens is not None else given.rows * row
    rows = given.rows if given.rows is not None else math.ceil(tokens / row)
    if tokens > rows * row and not given.packing:
        raise BadOption("--tokens", f"{rows:,} rows of at most {row:,} tokens hold {rows * row:,}")
    return tokens, rows


def _answer(request: QuoteRequest, gpu: Gpu, count: int, given: argparse.Namespace) -> Answer:
    price = catalog.list_price(gpu) if given.price is None else HourlyPrice(usd_per_hour=given.price, origin="as given")
    in_one = _IN_ONE_RACK if gpu.key.startswith(_RACK_PREFIX) else _IN_ONE_MACHINE
    facts = PoolFacts(
        gpu=gpu,
        price_nano=round(price.usd_per_hour * output.NANO_PER_USD) if price else None,
        live_workers=1,
        gpus_per_worker=in_one,
        max_gpu_count=max(count, _MAX_SUGGESTED_GPUS),
        host_memory_bytes=given.host_memory,
        is_spot=given.spot is not None,
        interruptions_per_hour=given.spot or 0.0,
    )
    nodes = given.nodes or math.ceil(count / in_one)
    try:
        estimate = quote(
            request=request,
            pool=shared_evenly(facts, gpu_count=count, node_count=nodes) if given.nodes else facts,
            published=catalog.published_speeds(),
            other_gpus=tuple(catalog.gpu_types().values()),
            gpu_count=count,
        )
    except EstimateError as error:
        raise _named(error) from error
    fixes = tuple(_with_list_price(fix) for fix in estimate.fixes)
    return Answer(gpu=gpu, price=price, estimate=msgspec.structs.replace(estimate, fixes=fixes), node_count=nodes)


def _with_list_price(fix: Fix) -> Fix:
    """Add a price to a change to another GPU type, for which the estimator knows only the time."""
    if fix.gpu_key is None or fix.train_seconds_p50 is None:
        return fix
    price = catalog.list_price(catalog.gpu_types()[fix.gpu_key])
    if price is None:
        return fix
    hours = fix.train_seconds_p50 / 3600
    return msgspec.structs.replace(fix, cost_nano_p50=round(price.usd_per_hour * output.NANO_PER_USD * hours))


def _named(error: EstimateError) -> BadOption:
    option = _OPTIONS.get(error.field, f"--{error.field.replace('_', '-')}")
    return BadOption("--targets" if error.field == "target_modules" else option, str(error))


def _counts(given: argparse.Namespace) -> list[int]:
    """Return the numbers of GPUs, each of them on all machines."""
    nodes, text = 1 if given.nodes is None else given.nodes, given.gpus
    if not 1 <= nodes <= MAX_NODES:
        raise BadOption("--nodes", f"must be between 1 and {MAX_NODES}")
    try:
        counts = [nodes] if text is None else [int(part) for part in text.split(",")]
    except ValueError as error:
        raise BadOption("--gpus", f"{text!r} is not a number such as 4, nor a list such as 1,2,4,8") from error
    if any(not 1 <= count <= 1024 for count in counts):
        raise BadOption("--gpus", "must be between 1 and 1,024")
    if odd := next((count for count in counts if count % nodes), None):
        raise BadOption("--gpus", f"{nodes} machines share the {odd} GPUs: give a multiple of {nodes}")
    return list(dict.fromkeys(counts))


def _whole(text: str) -> int:
    """Return the whole number written as 4096, 4_096 or 10e6."""
    value = float(text.replace(",", ""))
    if not math.isfinite(value) or value != int(value):
        raise ValueError(text)
    return int(value)


def _gib(text: str) -> int:
    value = float(text)
    if not 0 < value <= 1e6:
        raise ValueError(text)
    return int(value * GIB)


def _dollars(text: str) -> float:
    value = float(text.removeprefix("$"))
    if not 0 <= value <= _MAX_DOLLARS:
        raise ValueError(text)
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value <= 60:
        raise ValueError(text)
    return value


def _hours(text: str) -> float:
    value = float(text.removesuffix("h"))
    if not math.isfinite(value) or value <= 0:
        raise ValueError(text)
    return value


# argparse shows the type's name in its message: "invalid whole number value".
_whole.__name__, _dollars.__name__, _hours.__name__ = "whole number", "dollar", "hours"
_gib.__name__ = "GiB"
_rate.__name__ = "interruptions an hour"
