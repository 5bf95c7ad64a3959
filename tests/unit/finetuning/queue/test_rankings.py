"""The ranking that claims share: the same order as without it, and no run starts that may not start now."""

from datetime import timedelta

import pytest

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.finetuning.models import QueueRanking, WorkerKind
from apps.finetuning.runs import claims
from apps.finetuning.runs.queue import candidates
from apps.finetuning.runs.queue.candidates import rank
from apps.finetuning.usage import quotas
from tests.factories.finetuning import give_credit, make_job


@pytest.fixture
def take(claim):
    """Claim several runs, and return their organizations."""
    return lambda count: [claim().claimed.spec.organization_id for _ in range(count)]


def share_ranking(pool) -> QueueRanking:
    """Rank the pool's holders now, for all claims to come."""
    QueueRanking.objects.all().delete()
    assert rank(pool_id=pool.pk)
    QueueRanking.objects.update(kept_until=db_now() + timedelta(hours=1))
    assert not rank(pool_id=pool.pk)
    return QueueRanking.objects.get()


@pytest.mark.parametrize("is_shared", [True, False])
def test_claims_start_the_same_runs_with_one_ranking_as_with_one_for_each(floor, rival, take, is_shared):
    give_credit(rival)
    quotas.set_quota(organization=rival, by="system", now=db_now(), weight=2)
    ours, theirs = floor.organization.pk, rival.pk
    for _ in range(3):
        floor.job(), make_job(rival, floor.base_model)
    if is_shared:
        share_ranking(floor.pool)

    assert take(4) == [ours, theirs, theirs, ours]


def test_a_run_that_came_after_the_ranking_is_found_behind_its_turns(floor, rival, take):
    give_credit(rival)
    floor.job(), floor.job()
    share_ranking(floor.pool)
    make_job(rival, floor.base_model)

    assert take(3) == [floor.organization.pk, floor.organization.pk, rival.pk]


def test_a_holder_whose_listed_turns_were_all_taken_stays_in_the_ranking(floor, rival, take, monkeypatch):
    """Else others would start before it until the next ranking, and no machine would be kept for its large run."""
    monkeypatch.setattr(candidates, "_IN_ORDER", candidates._IN_ORDER.replace("LIMIT %(limit)s", "LIMIT 0"))
    give_credit(rival)
    quotas.set_quota(organization=floor.organization, by="system", now=db_now(), concurrent_gpus=4)
    floor.job(), floor.job(), floor.job()
    ranking = share_ranking(floor.pool)
    QueueRanking.objects.update(
        holders=ranking.holders[:1] * 2, organizations=ranking.organizations[:1] * 2, numbers=[1, -2],
        served=[0, 0], rooms=[None, None],
    )  # fmt: skip

    assert take(3) == [floor.organization.pk] * 3


@pytest.mark.parametrize("is_shared", [True, False])
def test_runs_that_came_after_the_ranking_take_turns_with_those_of_others(floor, rival, take, is_shared):
    """Else a holder could wait until it comes first with one run, and then start many."""
    give_credit(rival)
    ours, theirs = floor.organization.pk, rival.pk
    floor.job(), make_job(rival, floor.base_model), make_job(rival, floor.base_model)
    if is_shared:
        share_ranking(floor.pool)
    floor.job(), floor.job()

    assert take(4) == [ours, theirs, ours, theirs]


def test_each_holder_has_as_many_turns_and_the_one_that_stays_is_its_last(floor, rival):
    give_credit(rival)
    floor.job(), make_job(rival, floor.base_model)

    ranking = share_ranking(floor.pool)

    for organization in (floor.organization, rival):
        turns = zip(ranking.holders, ranking.numbers, strict=True)
        numbers = [number for holder, number in turns if holder == organization.share_holder]
        assert numbers == [*range(1, 17), -17]


@pytest.mark.parametrize(("looked_at", "expected"), [(256, [["ours"], ["theirs"], [], []]), (1, [["ours"]])])
def test_several_looks_miss_no_run_and_repeat_none_up_to_their_limit(floor, rival, monkeypatch, looked_at, expected):
    monkeypatch.setattr(candidates, "_BATCHES", (1, 1, 256))
    monkeypatch.setattr(candidates, "_LOOKED_AT", looked_at)
    give_credit(rival)
    names = {floor.job().runs.get().pk: "ours", make_job(rival, floor.base_model).runs.get().pk: "theirs"}
    share_ranking(floor.pool)
    known = {"free_gpus": 4, "free_bytes": None, "base_models": None, "now": db_now()}

    looks = list(candidates.list_candidates(worker=floor.worker, pool_id=floor.pool.pk, **known))

    assert [[names[each.run_id] for each in look] for look in looks] == expected


@pytest.mark.parametrize("change", ["suspended", "limited", "alone"])
def test_what_changed_since_the_ranking_counts_for_what_may_start(floor, rival, claim, change):
    give_credit(rival)
    floor.job(), make_job(rival, floor.base_model)
    share_ranking(floor.pool)
    first = Organization.objects.filter(pk=floor.organization.pk)
    if change == "suspended":
        first.update(suspended_at=db_now())
    elif change == "limited":
        quotas.set_quota(organization=floor.organization, by="system", now=db_now(), concurrent_gpus=0)
    else:  # its runs count for another share holder from now on
        first.update(has_own_share=True)

    assert claim().claimed.spec.organization_id == rival.pk


def test_a_ranking_that_no_claim_renewed_in_time_is_not_used(floor, rival, take, monkeypatch):
    give_credit(rival)
    floor.job(), make_job(rival, floor.base_model)
    ranking = share_ranking(floor.pool)
    monkeypatch.setattr(claims, "rank", lambda **_: False)  # as if another claim were about to
    swapped = {name: getattr(ranking, name)[::-1] for name in ("holders", "organizations")}
    QueueRanking.objects.update(**swapped, kept_until=db_now() - timedelta(seconds=2))

    assert take(2) == [floor.organization.pk, rival.pk]


@pytest.mark.parametrize(("at_least", "expected"), [(0.0, 2), (0.05, 50)])
def test_a_ranking_lists_turns_and_is_kept_for_a_millisecond_of_each_holder(floor, rival, settings, at_least, expected):
    settings.QUEUE_RANKING_SECONDS = at_least
    give_credit(rival)
    floor.job(), floor.job(), make_job(rival, floor.base_model)

    assert rank(pool_id=floor.pool.pk)

    ranking = QueueRanking.objects.get()
    assert list(zip(ranking.holders, ranking.numbers, strict=True))[:3] == [
        (floor.organization.share_holder, 1), (rival.share_holder, 1), (floor.organization.share_holder, 2),
    ]  # fmt: skip
    assert ranking.kept_until - ranking.made_at == timedelta(milliseconds=expected)


def test_a_ranking_without_a_holder_that_may_start_is_kept_and_none_is_made_of_an_empty_queue(floor, claim, settings):
    """Else each claim would rank again, as long as all holders are suspended or at their limits."""
    settings.QUEUE_RANKING_SECONDS = 60
    assert not rank(pool_id=floor.pool.pk)
    job = floor.job()
    Organization.objects.filter(pk=floor.organization.pk).update(suspended_at=db_now())

    assert rank(pool_id=floor.pool.pk)

    ranking = QueueRanking.objects.get()
    assert [ranking.holders, ranking.organizations, ranking.numbers, ranking.served, ranking.rooms] == [[]] * 5
    assert not rank(pool_id=floor.pool.pk)
    assert claim() is None
    Organization.objects.filter(pk=floor.organization.pk).update(suspended_at=None)
    assert claim().claimed.spec.job_id == job.pk


@pytest.mark.parametrize("state", ["cordoned_at", "drain_requested_at", "kind"])
def test_a_worker_that_takes_no_runs_ranks_nothing(floor, state):
    floor.job()
    setattr(floor.worker, state, WorkerKind.REPLICA if state == "kind" else db_now())
    floor.worker.save()

    assert claims.claim(worker=floor.worker, base_models=None) is None
    assert not QueueRanking.objects.exists()


def test_a_worker_without_free_gpus_ranks_nothing(floor):
    floor.job()

    assert claims.claim(worker=floor.worker, base_models=None, free_gpus=0) is None
    assert not QueueRanking.objects.exists()
