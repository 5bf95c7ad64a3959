"""Orders whose work comes later: conversions, pushes, retraining plans, moves, evals, batches, uploads and webhooks."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from tests.bench.neighbours.stage import Platform, Tenant
from tests.bench.neighbours.traffic import Entrance, as_key, get, send

_ANSWERED = {"item": {"question": "part", "answer": "Bye."}, "sample": {"output_text": "Bye."}}
_SIMILAR = {
    "type": "text_similarity", "name": "near", "input": "{{sample.output_text}}", "reference": "{{item.answer}}",
    "evaluation_metric": "fuzzy_match", "pass_threshold": 0.5,
}  # fmt: skip
_LINE = {
    "custom_id": "r", "method": "POST", "url": "/v1/chat/completions",
    "body": {"model": "bench", "messages": [{"role": "user", "content": "Hi"}]},
}  # fmt: skip
MANY_LINES = 2_000


@dataclass(frozen=True)
class _Goods:
    """What a hostile tenant orders with."""

    tenant: Tenant
    model: str
    eval_id: str
    batch_file_id: str
    adapter: dict[str, bytes]


_Order = Callable[[_Goods, int], tuple[str, object]]  # the path and the body of a new number


def entrances(platform: Platform) -> dict[str, Entrance]:
    working = platform.working
    paths = itertools.cycle(["/api/v1/me", f"/v1/fine_tuning/jobs/{working.job_id}", "/v1/files?limit=10"])

    async def call(client: aiohttp.ClientSession) -> None:
        await get(client, "GET", next(paths), as_key(working))

    def beside(make: _Order) -> Entrance:
        goods, numbers = _make_goods(platform), itertools.count(1)

        async def order(client: aiohttp.ClientSession, number: int) -> int:
            path, body = make(goods, next(numbers))
            return (await send(client, "POST", path, as_key(goods.tenant, number), body))[0]

        return Entrance(call, order, goods.tenant, forget=lambda: platform.forget_work(goods.tenant.organization_id))

    return {
        "API beside conversions": beside(_conversion),
        "API beside pushes to the hub": beside(_push),
        "API beside retraining plans": beside(_plan),
        "API beside moves": beside(_move),
        "API beside evals": beside(_eval),
        "API beside runs of evals": beside(_run),
        "API beside batches": beside(_batch),
        "API beside announced uploads": beside(_upload),
        "API beside uploaded adapters": beside(_adapter),
        "API beside webhooks": beside(_webhook),
    }


def _make_goods(platform: Platform) -> _Goods:
    from apps.accounts.models import Organization
    from apps.contracts.evaluation.graders import SimilarityGrader
    from apps.serving.evals.operations import create_eval
    from tests.factories.finetuning import adapter_files

    tenant = platform.make_tenant()
    organization = Organization.objects.get(pk=tenant.organization_id)
    near = SimilarityGrader(
        name="near", input="{{sample.output_text}}", reference="{{item.answer}}", evaluation_metric="fuzzy_match",
        pass_threshold=0.5,
    )  # fmt: skip
    evaluated = create_eval(
        organization=organization, name="near", data_source_config={"type": "custom"}, criteria=[near], metadata={},
        by="user_bench",
    )  # fmt: skip
    model, file_id = make_model(platform, tenant), make_requests(tenant, lines=MANY_LINES)
    return _Goods(tenant, model, evaluated.pk, file_id, adapter_files(platform.floor.base_model))


def make_model(platform: Platform, tenant: Tenant) -> str:
    """Return the name of a trained model of the tenant, with its files."""
    from apps.accounts.models import Organization
    from apps.core.objects.store import store
    from tests.factories.finetuning import adapter_files
    from tests.factories.serving import make_version

    prefix, files = f"bench/{tenant.organization_id}", []
    for name, content in adapter_files(platform.floor.base_model).items():
        kept = store().put_stream(f"{prefix}/{name}", [content])
        files.append({"name": name, "sha256": kept.sha256, "bytes": kept.bytes})
    organization = Organization.objects.get(pk=tenant.organization_id)
    manifest = {"kind": "adapter", "run_id": "run_bench", "attempt": 1, "step": 1, "files": files}
    fields = {"object_prefix": prefix, "manifest": manifest}
    return make_version(organization, platform.floor.base_model, **fields).model_name


def make_requests(tenant: Tenant, *, lines: int) -> str:
    """Return the id of a file of requests for a batch."""
    from apps.batches.files import create_file
    from apps.core.database.clock import db_now

    content = b"".join(json.dumps(_LINE | {"custom_id": f"r{n}"}).encode() + b"\n" for n in range(lines))
    return create_file(
        organization=tenant.organization_id, filename="asks.jsonl", chunks=[content], by="user_bench", now=db_now()
    ).pk


def pushes_of(model: str) -> str:
    return f"/api/v1/models/{model}/pushes"


def push_to(namespace: str, number: int) -> dict[str, str]:
    return {"repository": f"{namespace}/r{number}", "token": f"hf_{namespace}-token", "export": ""}


def batch_of(file_id: str) -> dict[str, str]:
    return {"input_file_id": file_id, "endpoint": _LINE["url"], "completion_window": "24h"}


def _conversion(goods: _Goods, number: int) -> tuple[str, object]:
    kind = ("merged_16bit", "gguf")[number % 2]
    return f"/api/v1/models/{goods.model}/conversions", {"kind": kind, "quoted_max_usd": "10"}


def _push(goods: _Goods, number: int) -> tuple[str, object]:
    return pushes_of(goods.model), push_to("hostile", number)


def _plan(goods: _Goods, number: int) -> tuple[str, object]:
    body = {
        "name": f"plan {number}", "source_job": goods.tenant.job_id, "dataset": goods.tenant.file_id,
        "alias": "production", "min_new_rows": 1, "max_usd": "1",
    }  # fmt: skip
    return "/api/v1/fine_tuning/retraining_plans", body


def _move(goods: _Goods, number: int) -> tuple[str, object]:
    return f"/api/v1/fine_tuning/jobs/{goods.tenant.job_id}/moves", {"option": "cpu:1", "quoted_max_usd": "1000"}


def _eval(goods: _Goods, number: int) -> tuple[str, object]:
    config = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
    criteria = [_SIMILAR | {"name": f"near {each}"} for each in range(10)]
    return "/v1/evals", {"name": f"eval {number}", "data_source_config": config, "testing_criteria": criteria}


def _run(goods: _Goods, number: int) -> tuple[str, object]:
    source = {"type": "jsonl", "source": {"type": "file_content", "content": [_ANSWERED] * 1_000}}
    return f"/v1/evals/{goods.eval_id}/runs", {"name": f"run {number}", "data_source": source}


def _batch(goods: _Goods, number: int) -> tuple[str, object]:
    return "/v1/batches", batch_of(goods.batch_file_id)


def _upload(goods: _Goods, number: int) -> tuple[str, object]:
    body = {"filename": f"{number}.jsonl", "bytes": 1_000, "purpose": "fine-tune", "mime_type": "text/jsonl"}
    return "/v1/uploads", body


def _adapter(goods: _Goods, number: int) -> tuple[str, object]:
    form = aiohttp.FormData({"name": f"adapter-{number % 50}"})
    form.add_field("adapter_config", goods.adapter["adapter_config.json"], filename="adapter_config.json")
    form.add_field("weights", goods.adapter["adapter_model.safetensors"], filename="adapter_model.safetensors")
    return "/api/v1/adapters", form


def _webhook(goods: _Goods, number: int) -> tuple[str, object]:
    body = {"url": f"https://hooks.example.com/{number}", "event_types": ["batch.completed"]}
    return "/api/v1/webhooks", body
