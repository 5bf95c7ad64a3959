"""Several machines in the wizard: where they are offered, what they cost, and that the job takes them."""

import html
import re

import pytest

from apps.core.database.clock import db_now
from apps.finetuning.models import FineTuningJob, GpuPool, Worker
from apps.finetuning.usage import quotas
from tests.factories.market import MACHINE_OFFER, Market, join_machines
from tests.support.pages import text

LIVE = {"HX-Request": "true", "HX-Target": "div#compute-live"}
FIELD = '<input type="number" name="node_count"'
NETWORK = r"2, their network takes [1-9]\d?% of the billed time"


@pytest.fixture
def ask(organization, client_for, bob):
    """Return a page of the wizard as text, asked for with changes to the address; `headers` make it a part."""
    market, client = Market(organization), client_for(bob)
    GpuPool.objects.exclude(name__in=("h200", "h100")).update(is_open=False)
    quotas.set_quota(organization=organization, by="system", now=db_now(), concurrent_gpus=16)

    def get(*, status: int = 200, step: str = "compute", headers: dict[str, str] | None = None, **changes: str) -> str:
        query = "".join(f"&{name}={value}" for name, value in changes.items())
        answer = client.get(f"{market.wizard}&step={step}{query}", headers=headers)
        assert answer.status_code == status
        return text(answer)

    return get


def costs(page: str) -> dict[str, float]:
    """Return the dollars of the table's options by their keys, without those that have no price."""
    rows = re.findall(r'data-pick data-cost="\$([\d.,]+)".*?value="([^"]+)"', page, re.DOTALL)
    return {key: float(cost.replace(",", "")) for cost, key in rows}


@pytest.mark.slow
def test_the_number_is_asked_for_where_workers_can_train_together(ask) -> None:
    without = ask()
    Worker.objects.filter(pool__name="h200").update(offer=MACHINE_OFFER)
    alone, asked = ask(), ask(node_count="2")
    join_machines()
    offered = ask()

    assert FIELD not in without and FIELD not in alone  # one machine has no other
    assert f'{FIELD} value="2"' in asked and "This pool has 1 now." in asked  # an address names it
    assert f'{FIELD} value="1"' in offered and "Machines</dt>" not in offered


@pytest.mark.slow
def test_every_quote_follows_the_number_with_what_the_network_takes(ask) -> None:
    join_machines()
    one, two = ask(several="1"), ask(headers=LIVE, several="1", node_count="2")
    chosen, method = ask(node_count="2", pool="h200:8"), ask(step="method", node_count="2")

    assert costs(two)["h200:2"] > costs(one)["h200:2"] and "h200" not in costs(two)
    assert "h200, on 2 machines, 8 × " in two
    assert "The job needs 2 machines that can reach each other. This pool has 0 now." in two  # the other pool
    assert re.search(f"<dt>Machines</dt><dd>{NETWORK}</dd>", chosen)
    assert re.search(r'value="h200:8"[^>]* checked', chosen)
    assert re.search(r'"gpu_count": 8,\s+"node_count": 2', chosen)  # the call to copy
    assert "<dt>Machines</dt><dd>2</dd>" in method
    assert '<input type="hidden" name="node_count" value="2">' in method


@pytest.mark.slow
def test_a_wrong_number_is_said_at_its_field_and_nothing_is_quoted(ask) -> None:
    join_machines()
    wrong = [
        ({"node_count": "0"}, "node_count must be a whole number from 1 to 64."),
        ({"node_count": "65"}, "node_count must be a whole number from 1 to 64."),
        ({"node_count": "many"}, "Enter a whole number."),
        ({"node_count": "3"}, "3 GPUs cannot share a batch of 32 rows evenly."),
        ({"node_count": "2", "cpu_offload": "True"}, "Training on several machines does not work with cpu_offload"),
    ]
    for changes, said in wrong:
        page, part = ask(status=422, **changes), ask(status=422, headers=LIVE, **changes)
        for shown in (page, part):
            assert f"Machines: {said}" in re.sub(r"<[^>]+>", "", shown)
            assert "Fix the highlighted fields" in shown and costs(shown) == {}
        assert f'{FIELD} value="{changes["node_count"]}"' in page


@pytest.mark.slow
def test_a_job_launched_on_several_machines_takes_them_and_says_so(ask, client_for, bob) -> None:
    join_machines()
    review = ask(step="review", pool="h200:8", node_count="2")
    form = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', review))

    client = client_for(bob)
    launched = client.post("/jobs/new", {name: html.unescape(value) for name, value in form.items()})
    job = FineTuningJob.objects.get()
    page = text(client.get(launched["Location"]))

    assert "<dt>Machines</dt><dd>2, 4 GPUs each</dd>" in review and re.search(NETWORK, review)
    assert (job.pool.name, job.gpu_count, job.node_count) == ("h200", 8, 2)
    assert str(job.spend_cap_nano) == form["cap_nano"]
    assert re.search(r"8 × [^<]+, h200, on 2 machines</span>", page)
    assert re.search(f'<dt>Machines</dt><dd class="break">{NETWORK}</dd>', page)
    assert re.search(r'href="/jobs/new\?[^"]*node_count=2', page)  # of its duplicate
    assert re.search(r'8 × [^<]+<div class="sub">\s*on 2 machines', text(client.get("/jobs")))
    head, row = b"".join(client.get("/jobs/export").streaming_content).decode().splitlines()
    assert dict(zip(head.split(","), row.split(","), strict=True))["machines"] == "2"
