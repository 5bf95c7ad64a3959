"""Aliases move at once and come back in one step; a version they stand for cannot go."""

import pytest

from apps.adapters.models import AdapterVersion
from apps.adapters.queries import get_version
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState, InvalidValue, NotFound
from apps.core.ids import new_ulid
from apps.serving import aliases
from apps.serving.aliases import (
    AliasMoved,
    VersionNotLoaded,
    delete_alias,
    loading_what_is_cold,
    point_alias,
    roll_back,
)
from apps.serving.models import Alias, Deployment, LoadedAdapter, ReplicaFleet
from apps.serving.operations import delete_model, undeploy
from apps.serving.placements import replan
from apps.serving.queries import list_alias_routes
from tests.factories.finetuning import make_pool
from tests.factories.money import give_credit
from tests.factories.serving import load, make_adapter, make_served_model
from tests.support.database import beside


@pytest.fixture
def versions(db: None, organization) -> list[AdapterVersion]:
    """Two loaded versions of one adapter."""
    base_model = make_served_model("small", "unix:///nowhere", is_priced=False)
    first = make_adapter(organization, base_model)
    ulid = new_ulid()
    second = AdapterVersion.objects.get(pk=first.pk)
    second.pk, second.number, second._state.adding = f"adpv_{ulid}", 2, True
    second.lora_name, second.model_name = f"a-{ulid}", first.model_name[:-8] + ulid[-8:]
    second.save(force_insert=True)
    Deployment.objects.create(organization=organization, adapter_version=second)
    load(second, base_model.replicas.get())
    return [first, second]


def point(version: AdapterVersion, name: str = "production", canary_percent: int = 0) -> Alias:
    return point_alias(version=version, name=name, canary_percent=canary_percent, by="user_1", now=db_now())


def targets() -> list[tuple[str, str, int]]:
    return [(route.target, route.canary_target, route.canary_percent) for route in list_alias_routes()]


def test_an_alias_moves_and_comes_back(versions) -> None:
    first, second = versions
    alias = point(first)
    point(second)
    assert targets() == [(second.model_name, "", 0)]

    roll_back(alias=alias, by="user_1", now=db_now())
    assert targets() == [(first.model_name, "", 0)]

    roll_back(alias=alias, by="user_1", now=db_now())  # and forward again
    assert targets() == [(second.model_name, "", 0)]


def test_a_canary_gets_its_share_and_ends_by_rolling_back_or_by_moving(versions) -> None:
    first, second = versions
    alias = point(first)
    point(second, canary_percent=10)
    assert targets() == [(first.model_name, second.model_name, 10)]

    roll_back(alias=alias, by="user_1", now=db_now())
    assert targets() == [(first.model_name, "", 0)]

    point(second, canary_percent=10)
    point(second)
    assert targets() == [(second.model_name, "", 0)]


def test_an_alias_moves_only_from_where_it_was_seen(versions) -> None:
    first, second = versions

    def move(version: AdapterVersion, expected: str, percent: int = 0) -> None:
        point_alias(
            version=version, name="production", by="user_1", now=db_now(), canary_percent=percent, expected=expected
        )

    with pytest.raises(AliasMoved, match="no longer exists"):
        move(first, second.model_name)
    move(first, "")
    for expected in ("", second.model_name):
        with pytest.raises(AliasMoved, match=first.model_name):
            move(second, expected)
    point(second, canary_percent=10)
    with pytest.raises(AliasMoved, match="canary"):
        move(second, first.model_name)
    assert targets() == [(first.model_name, second.model_name, 10)]

    roll_back(alias=Alias.objects.get(), by="user_1", now=db_now())
    move(second, first.model_name)
    assert targets() == [(second.model_name, "", 0)]


IMPORTED = "ft:gpt-4o-mini-2024-07-18:acme:faq:9aBcD1xy"


def test_an_imported_name_is_an_alias_that_may_move_to_another_adapter(organization, versions) -> None:
    first, _ = versions
    alias = point(first, IMPORTED)
    assert (alias.model_name, targets()) == (IMPORTED, [(first.model_name, "", 0)])

    elsewhere = make_adapter(organization, first.adapter.base_model)
    with pytest.raises(InvalidState, match="same adapter"):
        point(elsewhere, IMPORTED, canary_percent=10)
    point(elsewhere, IMPORTED)
    assert targets() == [(elsewhere.model_name, "", 0)]

    roll_back(alias=alias, by="user_1", now=db_now())
    alias = Alias.objects.get()
    assert (targets(), alias.adapter) == ([(first.model_name, "", 0)], first.adapter)


def test_the_version_an_imported_name_may_return_to_counts_as_used_after_a_move_to_another_base_model(
    organization, versions
) -> None:
    first, second = versions
    point(first, IMPORTED)
    point(make_adapter(organization, make_served_model("large", "unix:///other", is_priced=False)), IMPORTED)
    Deployment.objects.update(created_at="2000-01-01T00:00Z")

    replan(base_model_id=first.adapter.base_model_id, now=db_now())

    assert first.placements.count() == 1
    assert second.placements.count() == 0


def test_an_imported_name_cannot_be_that_of_a_model_here(organization, versions) -> None:
    first, second = versions
    ending = first.model_name.rpartition(":")[2]
    for name in (
        first.model_name,
        f"ft:{first.adapter.base_model.name}:rival:bot:{ending}",
        f"ft:{first.adapter.base_model.name.upper()}:rival:bot:{ending}",
        f"{IMPORTED}:ckpt-step-x",
        f"{IMPORTED}:ckpt-step-10:",
        "ft:gpt-4o-mini",
        "ft:gpt-4o mini:acme:faq:9aBc",
        IMPORTED + "x" * 40,
        f"ft:{'m' * 64}:{'o' * 64}:{'s' * 64}:{'i' * 40}:ckpt-step-10",
    ):
        with pytest.raises(InvalidValue) as refused:
            point(second, name)
        assert refused.value.param == "name"
    assert not Alias.objects.exists()


def test_an_alias_moves_only_to_what_is_loaded(versions) -> None:
    first, second = versions
    alias = point(first)
    LoadedAdapter.objects.filter(adapter_version=second).update(state="loading")

    with pytest.raises(VersionNotLoaded, match="No replica has loaded"):
        point(second)
    Deployment.objects.filter(adapter_version=second).update(removed_at=db_now())
    with pytest.raises(InvalidState, match="Serve it first"):
        point(second)

    alias.refresh_from_db()
    assert alias.version == first


@pytest.mark.parametrize(("status", "code"), [("refused", "invalid_state"), ("files_only", "version_not_loaded")])
def test_nothing_is_promised_for_a_version_that_no_replica_would_load_as_an_adapter(versions, status, code) -> None:
    LoadedAdapter.objects.all().delete()
    versions[1].status, versions[1].status_reason = status, "A tensor has another shape."

    with pytest.raises(InvalidState) as refused:
        point(versions[1])

    assert refused.value.code == code and "asked to load" not in refused.value.message
    assert ("another shape" in refused.value.message) == (status == "refused")


@pytest.mark.parametrize(
    "wrong", [{"name": "Prod"}, {"expected": "ft:other"}, {"canary_percent": 10}, {"name": "staging", "most": 1}]
)
def test_a_cold_version_is_not_asked_for_if_something_else_is_wrong(versions, monkeypatch, wrong) -> None:
    first, second = versions
    if most := wrong.pop("most", 0):
        point(first)
        monkeypatch.setattr(aliases, "MAX_ALIASES", most)
    LoadedAdapter.objects.filter(adapter_version=second).update(state="loading")

    with pytest.raises((InvalidValue, InvalidState)) as refused, loading_what_is_cold():
        point_alias(**{"version": second, "name": "production", "by": "user_1", "now": db_now()} | wrong)

    assert not isinstance(refused.value, VersionNotLoaded)
    assert Deployment.objects.get(adapter_version=second).last_requested_at is None


@pytest.mark.parametrize("has_credit", [False, True])
def test_a_cold_version_that_an_alias_was_refused_for_is_asked_for(organization, versions, has_credit: bool) -> None:
    _, second = versions
    base_model = second.adapter.base_model
    if has_credit:
        give_credit(organization)
    fleet = ReplicaFleet.objects.create(
        pool=make_pool("elastic"), base_model=base_model, region=base_model.replicas.get().region, able_at=db_now()
    )
    second.placements.all().delete()

    with pytest.raises(VersionNotLoaded), loading_what_is_cold():
        point(second)

    fleet.refresh_from_db()
    assert second.placements.count() == 1
    assert Deployment.objects.get(adapter_version=second).last_requested_at is not None
    assert (fleet.last_requested_at is not None) == has_credit


def test_what_an_alias_stands_for_is_neither_stopped_nor_deleted(organization, versions) -> None:
    first, _ = versions
    alias = point(first)

    with pytest.raises(InvalidState, match="production"):
        undeploy(version=first, by="user_1", now=db_now())
    with pytest.raises(InvalidState, match="production"):
        delete_model(organization=organization, model_name=first.model_name, by="user_1", now=db_now())

    delete_alias(alias=alias, by="user_1")
    undeploy(version=first, by="user_1", now=db_now())
    assert get_version(organization=organization, id=first.pk)
    assert targets() == []


def test_one_cannot_return_to_what_is_served_no_more(versions) -> None:
    first, second = versions
    alias = point(first)
    point(second)
    undeploy(version=first, by="user_1", now=db_now())

    with pytest.raises(InvalidState, match="no earlier version"):
        roll_back(alias=alias, by="user_1", now=db_now())


def test_what_an_alias_stands_for_stays_placed_without_requests(versions) -> None:
    first, second = versions
    point(first)
    Deployment.objects.update(created_at="2000-01-01T00:00Z")

    replan(base_model_id=first.adapter.base_model_id, now=db_now())

    assert first.placements.count() == 1
    assert second.placements.count() == 0


@pytest.mark.parametrize("name", ["Prod", "a", "0123456789", "abcdefghjk", "-x-", "x" * 41, "a b", ""])
def test_a_name_that_is_none_is_refused(versions, name: str) -> None:
    with pytest.raises(InvalidValue):
        point(versions[0], name)


@pytest.mark.parametrize("percent", [-1, 100])
def test_a_share_that_is_none_is_refused(versions, percent: int) -> None:
    point(versions[0])
    with pytest.raises(InvalidValue):
        point(versions[1], canary_percent=percent)


@pytest.mark.django_db(transaction=True)
def test_of_two_aliases_made_at_once_the_second_counts_the_first(versions, monkeypatch) -> None:
    monkeypatch.setattr(aliases, "MAX_ALIASES", 1)

    _, second = beside(lambda: point(versions[0]), lambda: point(versions[0], "staging"))

    assert isinstance(second, InvalidState)
    assert "at most 1 aliases" in second.message


@pytest.mark.django_db(transaction=True)
def test_of_two_requests_for_one_new_alias_the_second_moves_what_the_first_made(versions) -> None:
    first, second = beside(lambda: point(versions[0]), lambda: point(versions[1]))

    assert (second.pk, second.version) == (first.pk, versions[1])


def test_imported_names_count_for_the_organization_and_not_for_an_adapter(organization, versions, monkeypatch) -> None:
    first, _ = versions
    other = make_adapter(organization, first.adapter.base_model)
    monkeypatch.setattr(aliases, "MAX_ALIASES", 1)
    monkeypatch.setattr(aliases, "MAX_IMPORTED", 2)
    point(first)

    point(first, IMPORTED)
    point(other, f"{IMPORTED}:ckpt-step-88")
    point(first, f"{IMPORTED}:ckpt-step-88")
    with pytest.raises(InvalidState, match="at most 2 imported names"):
        point(other, f"{IMPORTED}z")
    with pytest.raises(InvalidState, match="at most 1 aliases"):
        point(first, "staging")


def test_an_alias_that_was_deleted_meanwhile_is_not_found(versions) -> None:
    alias = point(versions[0])
    delete_alias(alias=Alias.objects.get(), by="user_1")

    with pytest.raises(NotFound):
        roll_back(alias=alias, by="user_1", now=db_now())
