"""Rehearsed memory at review: asked by a member, traced by a worker, and believed if the formula or another agrees."""

import datetime
import html
import re
from urllib.parse import urlencode

import msgspec
import pytest

from apps.accounts.models import Organization
from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.runs import MemoryReport, MemoryRequest
from apps.contracts.worker_api import RehearsalReport, RehearsalRequest
from apps.core.database.clock import db_now
from apps.estimates.physics.memory import device_bytes
from apps.finetuning.jobs.admission import DoesNotFit
from apps.finetuning.models import GpuPool, MemoryRehearsal
from apps.finetuning.pools import rehearsals
from apps.finetuning.quotes.rehearsals import QuotedRehearsal, stored_rehearsal
from tests.factories.accounts import make_organization
from tests.factories.finetuning import CREDENTIAL, make_worker
from tests.factories.market import make_gpu_pool


@pytest.fixture
def chosen(chosen, floor) -> dict[str, str]:
    """Everything the review needs."""
    return chosen | {"epochs": "5", "pool": floor.pool.name}


def review(client, chosen: dict[str, str], **more: str):
    return html.unescape(client.get(f"/jobs/new?{urlencode(chosen | more)}").content.decode())


def rehearse(client, page: str):
    found = re.search(r'hx-post="(/jobs/new/rehearse[^"]+)"', page)
    assert found
    return client.post(found[1])


def report_of(taken: RehearsalRequest, *, times: float = 1.0) -> RehearsalReport:
    """Return a report whose peak is the formula's by this factor."""
    peak, resting = MemoryRehearsal.objects.get(pk=taken.digest).computed_bytes * times, 1_000_000
    none, one = (device_bytes(allocated=resting + more, resting=resting, is_cpu=True) for more in (0, 10**9))
    allocated = resting + round((peak - none) / (one - none) * 10**9)
    memory = MemoryReport(
        allocated_bytes=allocated, resting_bytes=resting, weight_bytes=1, peak_bytes=1, moment="head", moments={}
    )
    return RehearsalReport(digest=taken.digest, memory=memory)


def take(call, credential: str = CREDENTIAL) -> RehearsalRequest:
    return msgspec.json.decode(call("/rehearsals/next", credential=credential).content, type=RehearsalRequest)


@pytest.mark.slow
def test_a_review_asks_a_worker_and_shows_its_figure(chosen, floor, client_for, bob, call) -> None:
    client = client_for(bob)
    page = review(client, chosen)
    assert not MemoryRehearsal.objects.exists()
    asked = rehearse(client, page)
    assert "Waiting for the rehearsal" in asked.content.decode() and "HX-Refresh" not in asked.headers
    rehearse(client, page)  # asks nothing more
    assert MemoryRehearsal.objects.count() == 1
    MemoryRehearsal.objects.update(asked_at=db_now() - datetime.timedelta(minutes=3))
    assert "hx-post" not in rehearse(client, page).content.decode(), "all workers are busy: the page stops asking"

    make_worker(floor.pool, credential="annw_second")
    taken = take(call)
    assert call("/rehearsals/next", credential="annw_second").status_code == 204
    assert taken.memory.is_on_cpu and floor.organization.pk not in str(MemoryRehearsal.objects.values())
    assert call("/rehearsals", report_of(taken, times=4)).status_code == 400
    assert call("/rehearsals", RehearsalReport(digest="0" * 64)).status_code == 404
    assert call("/rehearsals", report_of(taken), credential="annw_unknown").status_code == 401
    assert call("/rehearsals", report_of(taken)).status_code == 204
    assert call("/rehearsals", report_of(taken, times=2)).status_code == 404, "a figure is reported once"

    assert "Rehearsed:" in rehearse(client, page).content.decode()
    shown = review(client, chosen)
    assert "Rehearsed:" in shown and "/jobs/new/rehearse" not in shown


def test_a_job_asks_when_it_is_admitted_to_gpus(floor) -> None:
    floor.job(method="lora", hyperparameters={"epochs": 5})
    assert not MemoryRehearsal.objects.exists(), "a CPU's runs start at once"
    pool = make_gpu_pool("l40s-48", 1.10, "us-east", 1)

    job = floor.job(method="lora", hyperparameters={"epochs": 5}, pool=pool.name)

    recipe = msgspec.convert(job.hyperparameters, Hyperparameters)
    stored = stored_rehearsal(base_model=job.base_model, recipe=recipe, estimate=job.estimate, is_on_cpu=False)
    assert stored and stored.digest == MemoryRehearsal.objects.get().pk


@pytest.mark.slow
def test_a_job_whose_rehearsal_exceeds_the_pool_is_not_launched_once_two_workers_agree(
    chosen, floor, client_for, bob, call
) -> None:
    client = client_for(bob)
    make_worker(floor.pool, credential="annw_second")
    GpuPool.objects.filter(pk=floor.pool.pk).update(memory_bytes=1_000_000_000)
    page = review(client, chosen)
    rehearse(client, page)
    asked = take(call)
    assert call("/rehearsals", report_of(asked, times=1.6)).status_code == 204
    assert call("/rehearsals/next").status_code == 204, "its own answer cannot agree with it"
    assert "Rehearsed" not in review(client, chosen) and floor.job(method="lora", hyperparameters={"epochs": 5})

    again = take(call, "annw_second")
    assert call("/rehearsals", report_of(again, times=1.6), credential="annw_second").status_code == 204

    assert rehearse(client, page).headers["HX-Refresh"] == "true"
    shown = review(client, chosen)
    assert re.search(r"The rehearsal needed 1\.\d GiB; CPU holds 0\.9 GiB\.", shown)
    assert re.search(r"<button[^>]*disabled[^>]*>.*?Launch", shown)
    words = " ".join(re.sub(r"<[^>]+>", " ", shown).split())
    assert "Money Estimate \N{EN DASH} You pay at most \N{EN DASH}" in words, "what cannot run has no cost"
    with pytest.raises(DoesNotFit, match="The rehearsal needed") as refused:
        floor.job(method="lora", hyperparameters={"epochs": 5})
    assert refused.value.data["fixes"], "what would make it fit is kept"


@pytest.mark.slow
def test_workers_that_disagree_leave_the_formula_and_an_interruption_is_no_answer(
    chosen, floor, client_for, bob, call
) -> None:
    client, others = client_for(bob), [f"annw_{number}" for number in range(2, 5)]
    page = review(client, chosen)
    rehearse(client, page)
    for _ in range(2):  # a worker that is restarted asks again; one that has to train gives the request back
        digest = take(call).digest
        assert take(call).digest == digest
        assert call("/rehearsals", RehearsalReport(digest=digest)).status_code == 204
    asked = take(call)
    call("/rehearsals", report_of(asked, times=1.2))
    assert "hx-post" not in rehearse(client, page).content.decode(), "no other worker is there to agree"

    for credential, times in zip(others, (1.4, 1.6), strict=False):
        make_worker(floor.pool, credential=credential)
        answered = call("/rehearsals", report_of(take(call, credential), times=times), credential)
        assert answered.status_code == 204

    make_worker(floor.pool, credential=others[-1])
    assert call("/rehearsals/next", credential=others[-1]).status_code == 204, "three answers are enough"
    assert "hx-post" not in rehearse(client, page).content.decode() and "Rehearsed" not in review(client, chosen)


def test_askers_take_turns_and_organizations_that_share_ask_as_one(floor, organization, rival, charlie) -> None:
    def ask(asker: Organization, number: int) -> bool:
        request = MemoryRequest(config={"n": number}, hyperparameters=Hyperparameters())
        quoted = QuotedRehearsal(request, computed_bytes=10**9)
        return rehearsals.ask(organization=asker, rehearsal=quoted, pool=floor.pool, now=db_now())

    assert all(ask(organization, number) for number in range(3))
    assert ask(rival, 10) and ask(rival, 11)
    second = make_organization("Second", owner=charlie)
    assert ask(second, 12) and not ask(second, 13)

    workers = [floor.worker, *(make_worker(floor.pool, credential=f"annw_{number}") for number in range(3))]
    taken = [rehearsals.take(worker=worker).memory.config["n"] for worker in workers]

    assert taken == [0, 10, 1, 11]
