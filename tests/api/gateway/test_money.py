"""What a request costs and who may go on asking: charges, slices, limits."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from django.db import transaction

from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.queries import KeyLimits
from apps.billing.budget_settings import set_key_labels
from apps.billing.models import Hold
from apps.billing.queries import get_balance, get_ledger_sum_nano, get_spending
from apps.billing.usage.metering import rate_usage
from apps.contracts.evaluation import Grader, GraderKind
from apps.contracts.worker_api import JudgeAccess
from apps.core.database.clock import db_now
from apps.core.money import rated
from apps.finetuning.usage.allowances import end_allowance, set_allowance
from apps.finetuning.usage.quotas import set_quota
from apps.serving.models import Replica
from gpu_workers.train.after.judge import Judge, Question
from tests.factories.accounts import make_key, make_member, make_member_token
from tests.factories.serving import BASE_MODEL, INPUT_NANO, OUTPUT_NANO, PER, USD, make_tenant
from tests.support.gateway.processes import HI, error_of, usage_of, wait_for_usage, wait_until
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(("is_streamed", "word"), [(True, "word "), (False, "word "), (False, "")])
def test_a_customer_who_leaves_stops_the_engine_and_pays_for_what_it_wrote(
    gateway, world, tenant, engine, is_streamed, word
):
    text = f"endless {is_streamed} {word}"
    engine.scripts[text] = Script(tokens=(word,) * 400, delay_seconds=0.02, prompt_tokens=5, is_paced=True)
    body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": text}], "stream": is_streamed}

    with gateway.left(tenant.key, "/v1/chat/completions", body):
        wait_until(lambda: engine.generated.get(text, 0) > 5, "the engine does not write")

    replicas = set(Replica.objects.filter(base_model=world.base_model).values_list("pk", flat=True))
    event = wait_for_usage(tenant, 1)[0]
    written = engine.generated[text]
    assert (event.finish, event.input_tokens) == ("aborted", 5)
    assert 0 < event.output_tokens <= written < 100
    assert written - event.output_tokens <= 2
    assert event.replica_id in replicas and event.engine_output_tokens == event.output_tokens
    assert (event.output_bytes is not None) is bool(word)


def test_a_customer_who_leaves_before_the_first_token_pays_nothing_and_uses_up_the_minute(gateway, world, engine):
    tenant = make_tenant("Leaver", world.base_model)
    with transaction.atomic():
        set_quota(organization=tenant.organization, by="system", now=db_now(), tokens_per_minute=120_000)
    text = "never " + "x" * 60_000
    engine.scripts[text] = Script(delay_seconds=30)
    body = {"model": BASE_MODEL, "prompt": text}

    with gateway.left(tenant.key, "/v1/completions", body):
        wait_until(lambda: any(text in str(asked) for asked in engine.bodies), "the engine was not asked")

    event = wait_for_usage(tenant, 1)[0]
    assert (event.finish, event.input_tokens, event.output_tokens) == ("aborted", 0, 0)
    answer = gateway.http(tenant.key).post("/v1/chat/completions", json={"model": BASE_MODEL, "messages": HI})
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 120_000 - 10_000


@pytest.mark.slow
def test_what_was_used_is_charged_exactly_and_the_slice_is_returned(gateway, tenant):
    client = gateway.openai(tenant.key)
    for _ in range(5):
        client.chat.completions.create(model=BASE_MODEL, messages=HI)
    events = wait_for_usage(tenant, 5)

    rate_usage()

    cost = rated(quantity=sum(e.input_tokens for e in events), price_nano=INPUT_NANO, per=PER)
    cost += rated(quantity=sum(e.output_tokens for e in events), price_nano=OUTPUT_NANO, per=PER)
    spending = get_spending(organization=tenant.organization)
    assert (spending.inference_nano, spending.unrated_requests) == (cost, 0)
    assert spending.tokens_billed == sum(e.input_tokens + e.output_tokens for e in events)
    held = Hold.objects.filter(organization=tenant.organization, purpose="inference")
    wait_until(lambda: not held.filter(status="open").exists(), "the slice was kept", seconds=15)
    balance = get_balance(organization=tenant.organization)
    assert (balance.available_nano, balance.held_nano) == (10 * USD - cost, 0)
    assert get_ledger_sum_nano() == 0


def test_an_exhausted_balance_is_refused_once_and_for_good(gateway, world):
    poor = make_tenant("Poor", world.base_model, credit_nano=0)
    body = {"model": BASE_MODEL, "messages": HI}

    answer = gateway.http(poor.key).post("/v1/chat/completions", json=body)
    with pytest.raises(openai.RateLimitError) as refused:
        gateway.openai(poor.key, max_retries=2).chat.completions.create(**body)

    assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
    assert refused.value.code == "insufficient_quota"
    assert error_of(answer)["required_nano"] > 0
    assert usage_of(poor) == []


@pytest.mark.slow
def test_many_requests_at_once_spend_no_more_than_there_is(gateway, world, engine):
    engine.scripts["spend"] = Script(prompt_tokens=20, tokens=("x",) * 50, delay_seconds=0.001)
    one = rated(quantity=20, price_nano=INPUT_NANO, per=PER) + rated(quantity=50, price_nano=OUTPUT_NANO, per=PER)
    poor = make_tenant("Few", world.base_model, credit_nano=12 * one)
    body = {"model": BASE_MODEL, "prompt": "spend", "max_tokens": 50}

    with gateway.http(poor.key) as http, ThreadPoolExecutor(12) as lanes:
        statuses = list(lanes.map(lambda _: http.post("/v1/completions", json=body).status_code, range(30)))

    served = statuses.count(200)
    assert set(statuses) == {200, 429}
    assert 5 <= served <= 12
    wait_for_usage(poor, served)
    rate_usage()
    assert get_spending(organization=poor.organization).inference_nano == served * one
    assert get_ledger_sum_nano() == 0


def test_requests_above_the_limit_per_minute_are_told_when_to_come_back(gateway, world):
    limited = make_tenant("Limited", world.base_model)
    with transaction.atomic():
        set_quota(organization=limited.organization, by="system", now=db_now(), requests_per_minute=2)
    http = gateway.http(limited.key)

    answers = [http.post("/v1/chat/completions", json={"model": BASE_MODEL, "messages": HI}) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2].headers["retry-after"]) >= 1
    assert error_of(answers[2])["code"] == "rate_limit_exceeded"
    assert [answer.headers["x-ratelimit-limit-requests"] for answer in answers] == ["2"] * 3
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-tokens"]


def test_a_key_has_limits_of_its_own(gateway, world):
    limited = make_tenant("Narrow", world.base_model)
    narrow = make_key(limited.organization, limited.owner, limits=KeyLimits(tokens_per_minute=50))
    body = {"model": BASE_MODEL, "messages": HI, "max_tokens": 40}

    first, second = (gateway.http(narrow).post("/v1/chat/completions", json=body) for _ in range(2))
    other = gateway.http(limited.key).post("/v1/chat/completions", json=body)

    assert (first.status_code, first.headers["x-ratelimit-limit-tokens"]) == (200, "50")
    assert (second.status_code, other.status_code) == (429, 200)
    assert "This key's limit is 50 tokens per minute" in error_of(second)["message"]


@pytest.mark.parametrize("scope", ["member", "label"])
def test_keys_of_a_member_or_a_label_share_a_limit_until_it_ends(gateway, world, scope):
    shared = make_tenant("Shared", world.base_model)
    organization, owner = shared.organization, shared.owner
    with transaction.atomic():
        keys = [shared.key, make_key(organization, owner)]
        other = make_key(organization, make_member(organization, "member"), scopes=frozenset({"inference"}))
        for key in keys:
            set_key_labels(organization=organization, key_id=key.key.pk, labels={"team": "search"}, by=owner.pk)
        target = owner.pk if scope == "member" else "team=search"
        allowance = set_allowance(
            organization=organization, scope=scope, target=target, limits={"requests_per_minute": 2}, by=owner.pk,
            now=db_now(),
        )  # fmt: skip

    def ask(key: IssuedKey) -> httpx.Response:
        return gateway.http(key).post("/v1/chat/completions", json={"model": BASE_MODEL, "messages": HI})

    answers = [ask(key) for key in (*keys, *keys, other)]

    assert [answer.status_code for answer in answers] == [200, 200, 429, 429, 200]
    assert [answer.headers["x-ratelimit-limit-requests"] for answer in answers[:3]] == ["2"] * 3
    refused = error_of(answers[2])
    assert refused["code"] == "rate_limit_exceeded" and int(answers[2].headers["retry-after"]) >= 1
    assert f"The {scope} {target}'s limit is 2 requests per minute" in refused["message"]
    with transaction.atomic():
        end_allowance(organization=organization, allowance_id=allowance.pk, by=owner.pk)
    wait_until(lambda: ask(shared.key).status_code == 200, "the allowance still counts")


@pytest.mark.slow
def test_a_members_token_is_metered_and_limited_like_any_key(gateway, world):
    limited = make_tenant("Playground", world.base_model)
    with transaction.atomic():
        set_quota(organization=limited.organization, by="system", now=db_now(), requests_per_minute=2)
        token = make_member_token(limited.organization, limited.owner)
    body = {"model": limited.model_name, "messages": HI}

    answers = [gateway.http(key).post("/v1/chat/completions", json=body) for key in (limited.key, token, token)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert error_of(answers[2])["code"] == "rate_limit_exceeded"
    by_key, by_token = sorted(wait_for_usage(limited, 2), key=lambda event: event.key_id == token.key.pk)
    assert (by_key.key_id, by_token.key_id) == (limited.key.key.pk, token.key.pk)
    used = ("model_name", "input_tokens", "output_tokens", "input_price_id", "output_price_id")
    assert [getattr(by_token, name) for name in used] == [getattr(by_key, name) for name in used]
    rate_usage()
    cost = rated(quantity=2 * by_key.input_tokens, price_nano=INPUT_NANO, per=PER)
    cost += rated(quantity=2 * by_key.output_tokens, price_nano=OUTPUT_NANO, per=PER)
    assert get_spending(organization=limited.organization).inference_nano == cost > 0


@pytest.mark.slow
def test_a_judges_calls_are_metered_and_billed_like_any_other(gateway, tenant, engine):
    """The worker's own judge before the gateway's process, with the key that a run's worker is given."""
    question = Question(question="The colour?", reference="red", answer="It is red.")
    material = {"question": "The colour?", "reference_answer": "red", "answer": "It is red."}
    engine.scripts[json.dumps(material)] = Script(tokens=("4",), prompt_tokens=40)
    with transaction.atomic():
        issued = make_member_token(tenant.organization, tenant.owner, name="Judge")
    access = JudgeAccess(url="http://gateway/v1", key=issued.secret, model=tenant.model_name)
    grader = Grader(kind=GraderKind.JUDGE, model=tenant.model_name)
    transport = httpx.HTTPTransport(uds=str(gateway.socket))

    found = Judge(grader, access, seconds=30, transport=transport).judge([question] * 3)

    assert (found.scores, found.calls, found.trouble) == ([0.75] * 3, 3, "")
    events = wait_for_usage(tenant, 3)
    assert {event.key_id for event in events} == {issued.key.pk}
    billed = sum(event.input_tokens for event in events), sum(event.output_tokens for event in events)
    assert billed == (found.input_tokens, found.output_tokens) == (120, 3)
