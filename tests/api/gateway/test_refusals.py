"""Who may ask, and what an engine refuses: told in one shape, without the engine's inside."""

from time import monotonic

import httpx
import openai
import pytest

from apps.accounts.login.key_operations import revoke_key
from apps.core.database.clock import db_now
from apps.interfaces.gateway.admission.keys import FRESH_SECONDS
from tests.factories.accounts import make_key
from tests.factories.serving import BASE_MODEL
from tests.support.gateway.processes import HI, error_of, wait_for_usage, wait_until
from tests.twins.scripted_engine import Script

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_each_route_asks_for_a_key_with_the_scope_of_inference(gateway, world, path):
    field = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}[path]
    body = {"model": world.acme.model_name, field: "Hi" if field == "prompt" else HI}
    narrow = make_key(world.acme.organization, world.acme.owner, scopes=frozenset({"view"}))
    answers = {
        name: gateway.http(key).post(path, json=body)
        for name, key in {
            "owner": world.acme.key,
            "no scope": narrow,
            "outsider": world.rival.key,
            "anonymous": None,
            "malformed": "ann_live_nonsense",
        }.items()
    }

    statuses = {name: answer.status_code for name, answer in answers.items()}
    assert statuses == {"owner": 200, "no scope": 403, "outsider": 404, "anonymous": 401, "malformed": 401}
    assert error_of(answers["no scope"])["code"] == "insufficient_permissions"
    assert error_of(answers["anonymous"])["code"] == "invalid_api_key"
    assert answers["anonymous"].headers["www-authenticate"] == "Bearer"


def test_the_project_that_openais_clients_name_must_be_the_one_of_the_key(gateway, world):
    http, own = gateway.http(world.acme.key), world.acme.key.key.project_id
    bodies = {"/v1/chat/completions": {"messages": HI}, "/v1/embeddings": {"input": "Hi"}}
    for path, body in bodies.items():
        answers = {
            named: http.post(path, json={"model": world.acme.model_name} | body, headers={"OpenAI-Project": named})
            for named in (own, world.rival.key.key.project_id, "proj_unknown")
        }
        mismatched = {named for named, answer in answers.items() if error_of_any(answer) == "mismatched_project"}
        assert mismatched == set(answers) - {own} and {answers[each].status_code for each in mismatched} == {401}


def error_of_any(answer: httpx.Response) -> str:
    return "" if answer.status_code == 200 else error_of(answer)["code"]


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({}, 400, "model_not_supported", "model"),
        ({"input": None}, 400, "missing_required_parameter", "input"),
        ({"input_type": "query"}, 400, "unknown_parameter", "input_type"),
        ({"model": "ft:tiny:nobody:x:1"}, 404, "model_not_found", "model"),
    ],
)
def test_embeddings_are_refused_by_name_where_no_engine_makes_them(gateway, world, change, status, code, param):
    answer = gateway.http(world.acme.key).post(
        "/v1/embeddings", json={"model": world.acme.model_name, "input": "Hi"} | change
    )

    assert (answer.status_code, error_of(answer)["code"], error_of(answer)["param"]) == (status, code, param)
    assert gateway.http(None).post("/v1/embeddings", json={"model": BASE_MODEL, "input": "Hi"}).status_code == 401


def test_a_foreign_model_is_answered_like_one_that_does_not_exist(gateway, world):
    http = gateway.http(world.acme.key)

    foreign, unknown, internal = (
        http.post("/v1/chat/completions", json={"model": name, "messages": HI})
        for name in (world.rival.model_name, "ft:tiny:nobody:x:1", world.acme.lora_name)
    )

    assert foreign.status_code == unknown.status_code == internal.status_code == 404
    assert foreign.content == unknown.content == internal.content
    assert (error_of(foreign)["code"], error_of(foreign)["param"]) == ("model_not_found", "model")


def test_a_revoked_key_stops_at_once(gateway, world):
    """Sooner than any key is looked up by its age; a busy machine may hold some of the news up that long, not all."""

    def seconds_served() -> float:
        key = make_key(world.acme.organization, world.acme.owner)
        http = gateway.http(key)
        asked = "/v1/chat/completions", {"model": BASE_MODEL, "messages": HI}
        assert http.post(asked[0], json=asked[1]).status_code == 200
        revoke_key(organization=world.acme.organization, key_id=key.key.pk, by=world.acme.owner, now=db_now())
        revoked_at = monotonic()
        wait_until(lambda: http.post(asked[0], json=asked[1]).status_code == 401, "still served", seconds=5)
        return monotonic() - revoked_at

    assert any(seconds_served() < FRESH_SECONDS - 0.1 for _ in range(10))


def test_the_use_of_a_key_is_noted(gateway, world):
    key = make_key(world.acme.organization, world.acme.owner)

    gateway.openai(key).chat.completions.create(model=BASE_MODEL, messages=HI)

    key.key.refresh_from_db()
    assert key.key.last_used_at is not None


def test_other_urls_and_methods_get_errors_of_the_same_shape(gateway, world):
    http = gateway.http(world.acme.key)

    assert http.post("/v1/edits").status_code == 404
    assert error_of(http.get("/v1/responses/resp_1"))["code"] == "unknown_url"
    assert http.get("/v1/chat/completions").status_code == 405


def test_the_gateway_tells_how_long_its_loop_stood_still(gateway):
    told = gateway.http().get("/healthz").json()

    assert told["longest_stall_ms"] >= told["longest_stall_of_last_minute_ms"] >= 0


def test_a_prompt_that_is_too_long_is_told_so_without_the_engines_words(gateway, tenant, engine):
    engine.scripts["long"] = Script(
        status=400,
        error={
            "message": "This model's maximum context length is 512 tokens. However, your prompt contains 700 input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
            "prompt. (parameter=input_tokens, value=700)",
            "type": "BadRequestError",
            "param": "input_tokens",
            "code": 400,
        },
    )

    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai(tenant.key).chat.completions.create(
            model=BASE_MODEL, messages=[{"role": "user", "content": "long"}]
        )

    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    assert "512" in refused.value.message and "700" in refused.value.message
    assert "parameter=" not in refused.value.message
    assert wait_for_usage(tenant, 1)[0].output_tokens == 0


def test_another_refusal_of_the_engine_shows_none_of_its_inside(gateway, tenant, engine):
    engine.scripts["odd"] = Script(
        status=400, error={"message": "Trace /opt/vllm/x.py a-01m7z34d0r6kwakqa9bydwv1d5", "param": None}
    )

    answer = gateway.http(tenant.key).post(
        "/v1/chat/completions", json={"model": BASE_MODEL, "messages": [{"role": "user", "content": "odd"}]}
    )

    assert answer.status_code == 400
    assert "a-01" not in answer.text and "vllm" not in answer.text


def test_a_refusal_that_comes_inside_the_stream_is_the_requests_fault_too(gateway, tenant, engine):
    engine.scripts["bias"] = Script(
        fails_after=0,
        error={
            "message": "token_id(s) [999999] in logit_bias contain out-of-vocab",
            "param": "logit_bias",
            "code": 400,
        },
    )

    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai(tenant.key).chat.completions.create(
            model=BASE_MODEL, messages=[{"role": "user", "content": "bias"}], logit_bias={"999999": 1}
        )

    assert (refused.value.param, refused.value.code) == ("logit_bias", "invalid_value")
