"""A replica that lies about tokens: customers pay no more than was reserved, and it gets no more requests."""

import pytest

from apps.billing.queries import get_balance, get_ledger_sum_nano, get_spending
from apps.billing.usage.metering import rate_usage
from apps.core.money import rated
from apps.interfaces.gateway.requests.schema import parse_completion
from apps.serving.models import Replica
from tests.factories.serving import CONTEXT_LENGTH, INPUT_NANO, OUTPUT_NANO, PER, USD, make_served_model
from tests.support.gateway.processes import wait_for_usage, wait_until
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("read", Script(tokens=("x",), prompt_tokens=10**12)),
        ("overflow", Script(tokens=("x",), prompt_tokens=10**30)),
        ("written", Script(tokens=("x",) * 2, prompt_tokens=3)),
        ("negative", Script(tokens=("x",), prompt_tokens=-(10**12))),
    ],
)
def test_a_forged_count_costs_at_most_what_was_reserved_and_isolates_its_replica(gateway, tenant, engine, name, script):
    base_model = make_served_model(f"forged-{name}", engine.url)
    engine.scripts[f"forge {name}"] = script
    body = {"model": base_model.name, "prompt": f"forge {name}", "max_tokens": 1}
    http = gateway.http(tenant.key)

    answer = wait_until(lambda: (found := http.post("/v1/completions", json=body)).status_code != 404 and found, "no")
    event = wait_for_usage(tenant, 1)[0]
    replica = wait_until(
        lambda: base_model.replicas.filter(isolated_at__isnull=False).first(), "the replica was not isolated"
    )
    rate_usage()

    asked = parse_completion(answer.request.content)
    most = asked.input_tokens_bound(CONTEXT_LENGTH), asked.output_tokens_bound(CONTEXT_LENGTH)
    usage = answer.json()["usage"]
    assert answer.status_code == 200, answer.text
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (event.input_tokens, event.output_tokens)
    assert 0 <= event.input_tokens <= most[0] and event.output_tokens <= most[1] == 1
    assert (event.engine_input_tokens, event.engine_output_tokens) == (event.input_tokens, event.output_tokens)
    paid = get_spending(organization=tenant.organization)
    cost = rated(quantity=event.input_tokens, price_nano=INPUT_NANO, per=PER)
    assert paid.inference_nano == cost + rated(quantity=event.output_tokens, price_nano=OUTPUT_NANO, per=PER)
    assert paid.unrated_requests == get_ledger_sum_nano() == 0
    assert get_balance(organization=tenant.organization).available_nano > 9 * USD
    assert event.id in replica.isolated_because and replica.fault_count >= 1
    wait_until(lambda: http.post("/v1/completions", json=body).status_code == 503, "it is asked again")
    Replica.objects.filter(pk=replica.pk).update(isolated_at=None)
