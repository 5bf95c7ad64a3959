"""Images and audio reach an engine only where its model takes them, and no URL sends it where it must not go."""

import json

import pytest

from apps.catalog.models import BaseModel
from apps.core.errors import DomainError
from apps.interfaces.gateway.requests.engine_request import EngineRequest
from apps.interfaces.gateway.requests.media import MAX_MEDIA, require_allowed
from apps.interfaces.gateway.requests.schema import parse_chat

HOSTS = frozenset({"images.example.com", "10.0.0.1"})
PIXEL = "data:image/png;base64,iVBORw0KGgo="
SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
WORDS = {"type": "text", "text": "What is it?"}


def image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def parse(*parts: dict[str, object], role: str = "user") -> EngineRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [{"role": role, "content": parts}]}).encode())


def refusal_of(request: EngineRequest, *, taken: tuple[str, ...] = ("image",)) -> tuple[str, str | None]:
    with pytest.raises(DomainError) as refused:
        require_allowed(request.media, taken=taken, hosts=HOSTS)
    return refused.value.code, refused.value.param


@pytest.mark.parametrize(
    "url",
    [
        "https://images.example.com/a.png",
        "https://IMAGES.example.com:443/a?b=c&d=%20",
        "https://images.example.com",
        PIXEL,
    ],
)
def test_a_listed_host_and_bytes_in_the_request_pass_to_a_model_that_sees(url):
    request = parse(WORDS, image(url))

    require_allowed(request.media, taken=("image",), hosts=HOSTS)

    assert request.fields["messages"] == [{"role": "user", "content": [WORDS, image(url)]}]


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.com/a.png",
        "https://other.example.com/a.png",
        "https://images.example.com.evil.org/a.png",
        "https://evil.org/https://images.example.com",
        "https://images.example.com@evil.org/a.png",
        "https://evil.org\\@images.example.com/a.png",
        "https://images.example.com\\@evil.org/a.png",
        "https://images.example.com:8443/a.png",
        "https://images.example.com./a.png",
        "https://images.example.com/a b",
        "https://images.example.com/a\n",
        "https://images.example.com/\u00e9",
        " https://images.example.com/a.png",
        "https://10.0.0.1/a.png",
        "https://0x0a000001/a.png",
        "https://[::1]/a.png",
        "https:images.example.com/a.png",
        "//images.example.com/a.png",
        "file:///etc/passwd",
        "s3://images.example.com/a",
        "DATA:image/png;base64,iVBORw0KGgo=",
        "data:text/html;base64,aGk=",
        "data:image/svg+xml;base64,aGk=",
        "data:audio/wav;base64,aGk=",
        "https://images.example.com/" + "a" * 3000,
        "",
    ],
)
def test_any_other_url_is_refused_by_its_field(url):
    assert refusal_of(parse(WORDS, image(url))) == ("invalid_value", "messages[0].content[1].image_url.url")


@pytest.mark.parametrize(
    ("part", "taken"),
    [
        (image("https://images.example.com/a.png"), ()),
        (image(PIXEL), ("audio",)),
        (SOUND, ("image",)),
        ({"type": "audio_url", "audio_url": {"url": "https://images.example.com/a.wav"}}, ("image",)),
    ],
)
def test_a_model_that_does_not_take_them_refuses_them_by_name(part, taken):
    assert refusal_of(parse(part), taken=taken) == ("unsupported_parameter", "messages[0].content[0].type")


@pytest.mark.parametrize(
    ("parts", "role", "param"),
    [
        ([image(PIXEL)], "system", "messages[0].content[0].type"),
        ([{"type": "video_url", "video_url": {"url": PIXEL}}], "user", "messages[0].content[0].type"),
        ([{"type": "image_url"}], "user", "messages[0].content[0].image_url"),
        ([{"type": "image_url", "uuid": "of-another-tenant"}], "user", "messages[0].content[0].image_url"),
        ([{"type": "image_url", "image_url": {}}], "user", "messages[0].content[0].image_url.url"),
        ([image(PIXEL)] * (MAX_MEDIA + 1), "user", "messages[0].content"),
    ],
)
def test_what_no_model_takes_is_refused_at_once(parts, role, param):
    with pytest.raises(DomainError) as refused:
        parse(*parts, role=role)

    assert refused.value.param == param


def test_the_engines_own_fields_of_a_part_stay_outside():
    """Its `uuid` would answer from what another tenant's request left in its cache."""
    given = {"type": "image_url", "uuid": "u", "image_url": {"url": PIXEL, "detail": "high", "uuid": "u"}}

    assert parse(WORDS, given, SOUND).fields["messages"][0]["content"] == [WORDS, image(PIXEL), SOUND]


def test_text_alone_is_one_text_and_holds_no_media():
    request = parse(WORDS, WORDS)

    assert request.fields["messages"][0]["content"] == "What is it?\nWhat is it?"
    assert request.media == ()


def test_an_image_may_be_longer_than_its_link_and_shorter_than_its_bytes():
    link, inline = parse(image("https://images.example.com/a.png")), parse(image(PIXEL + "A" * 1_000_000))

    assert link.input_tokens_bound(4096) == inline.input_tokens_bound(4096) == 4096
    assert link.tokens_estimate() == inline.tokens_estimate() < 10_000


def test_the_text_beside_an_image_counts():
    words = {"type": "text", "text": "A" * 400_000}

    assert 0 <= parse(words, image(PIXEL)).prompt_tokens_estimate() - parse(words).prompt_tokens_estimate() < 10_000


@pytest.mark.parametrize(
    ("config", "media"),
    [
        ({"model_type": "llama"}, ()),
        ({"vision_config": None}, ()),
        ({"vision_config": {"hidden_size": 8}}, ("image",)),
        ({"vision_config": {"hidden_size": 8}, "audio_config": {"hidden_size": 8}}, ("image", "audio")),
    ],
)
def test_a_base_model_takes_what_its_config_describes_an_encoder_for(config, media):
    assert BaseModel(config=config).media == media
