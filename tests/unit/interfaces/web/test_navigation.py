"""Where the sidebar, the palette and the keys lead."""

from types import SimpleNamespace

from django.test import RequestFactory

from apps.interfaces.web.shell import navigation


def _request(view_name: str = "web:key_list", *, is_operator: bool = False) -> object:
    request = RequestFactory().get("/")
    request.user = SimpleNamespace(is_operator=is_operator)
    request.resolver_match = SimpleNamespace(view_name=view_name)
    return request


def test_the_place_one_is_at_is_marked_also_below_its_index() -> None:
    links = {link.label: link for section in navigation.sections(_request("web:key_revoke")) for link in section.links}

    assert links["API keys"].current
    assert not links["Members"].current


def test_only_operators_see_the_operator_section() -> None:
    assert [section.label for section in navigation.sections(_request())] == ["", "Account"]
    assert navigation.sections(_request(is_operator=True))[-1].label == "Operator"


def test_no_two_places_share_a_key() -> None:
    places = navigation.MAIN + navigation.ACCOUNT + navigation.OPERATOR
    keys = [place.go for place in places if place.go]

    assert len(keys) == len(set(keys))


def test_a_request_that_matched_no_url_marks_nothing() -> None:
    request = _request()
    request.resolver_match = None

    assert not any(link.current for section in navigation.sections(request) for link in section.links)
