"""An organization that is limited to regions: every path to a machine or a file elsewhere is refused.

Batches, evals, the playground, judges and canaries ask the gateway, whose routes are among the paths.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import pytest
from django.db import DatabaseError, transaction

from apps.accounts.models import Membership, Organization, Region
from apps.accounts.operations import create_region, set_home_region, set_regions
from apps.accounts.queries import list_limited
from apps.batches.completions.records import get_allowance
from apps.batches.files import create_file
from apps.batches.operations import create_batch
from apps.billing.queries import get_balance
from apps.catalog.operations import set_price
from apps.contracts.parity import ParityProbe, ParityRow
from apps.contracts.worker_api import ConversionClaim, ExaminationReport
from apps.core.database.clock import db_now
from apps.core.database.tenancy import tenant
from apps.core.errors import DomainError, InvalidValue
from apps.core.models import AuditEntry
from apps.datasets.intake.uploads import create_upload
from apps.datasets.intake.versions import create_version
from apps.finetuning.conversions import leases as conversions
from apps.finetuning.conversions.orders import list_offers
from apps.finetuning.jobs import control
from apps.finetuning.jobs.moves import list_moves, move_job
from apps.finetuning.jobs.waits import WaitCause, explain_wait
from apps.finetuning.models import Conversion, Examination, FineTuningJob, GpuPool, PoolCapacity, Worker
from apps.finetuning.pools.capacity.fleets import lock_fleets, plan_fleets
from apps.finetuning.pools.operations import edit_pool, issue_worker_token
from apps.finetuning.quotes.options import PoolQuote
from apps.finetuning.quotes.queries import get_quotes
from apps.finetuning.recipes.stored_requests import recipe_of
from apps.finetuning.results import examinations
from apps.finetuning.results.hub_pushes import request_push
from apps.finetuning.results.uploaded_adapters import upload_adapter
from apps.finetuning.runs.leases import StaleLease
from apps.interfaces.gateway.engines.routes import Routes, _Table
from apps.playground.conversations import keep_conversation
from apps.playground.presets import save_preset
from apps.playground.transcripts import PlaySettings, Transcript
from apps.serving.evals.operations import create_eval
from apps.serving.models import Alias, Deployment, Placement, Replica, ReplicaFleet
from apps.serving.operations import desired_state
from apps.serving.placements import replan
from apps.serving.queries import list_alias_routes, list_routes
from tests.factories.finetuning import (
    TrainingSetup,
    adapter_files,
    make_pool,
    make_training_file,
    make_worker,
    manifest_of,
)
from tests.factories.serving import load, make_adapter, make_replica, make_version, make_whole_model
from tests.support.attempts import paused_at

FINE = "nothing was refused"


@dataclass
class Regions:
    """Two pools and two replicas, in eu and us. Files are stored in eu, where the organization is limited to."""

    floor: TrainingSetup
    us: GpuPool
    us_worker: Worker

    @property
    def organization(self) -> Organization:
        return Organization.objects.get(pk=self.floor.organization.pk)

    def limit(self, *regions: str) -> None:
        with transaction.atomic():
            set_regions(organization=self.organization, regions=regions, by="user_operator")


@pytest.fixture
def world(floor: TrainingSetup) -> Regions:
    for name in ("eu", "us"):
        create_region(name=name, by="user_operator")
    set_home_region(region=Region.objects.get(pk="eu"), by="user_operator")
    GpuPool.objects.update(region="eu")
    us = make_pool("us-cpu")
    GpuPool.objects.filter(pk=us.pk).update(region="us")
    us.refresh_from_db()
    floor.worker.pool.refresh_from_db()
    worker = make_worker(us, credential="annw_us", base_model=floor.base_model, gpus=4)
    return Regions(floor, us, worker)


def refusal(attempt: Callable[[], object]) -> str:
    """Return the code and the words that refused the attempt."""
    try:
        with transaction.atomic():
            attempt()
    except DomainError as refused:
        return f"{refused.code}: {refused.message}"
    return FINE


def quotes_of(world: Regions, job: FineTuningJob) -> dict[str, PoolQuote]:
    asked = get_quotes(base_model=job.base_model, version=job.training_file, recipe=recipe_of(job), now=db_now())
    return {quoted.pool.name: quoted for quoted in asked}


def move(job: FineTuningJob, option: str) -> None:
    move_job(job=job, option=option, by="user_1", now=db_now(), shown_max_nano=10**12)


def routes_now() -> Routes:
    """The gateway's routes as it would read them now."""
    routes = Routes(SimpleNamespace(call=None))
    aliases = {(alias.organization_id, alias.model_name): alias for alias in list_alias_routes()}
    routes._table = _Table({route.model_name: route for route in list_routes()}, {}, 0.0, aliases, list_limited())
    return routes


def asker(organization: Organization) -> SimpleNamespace:
    return SimpleNamespace(organization_id=organization.pk, sight=None)


def asked_at(model_name: str, organization: Organization) -> list[str]:
    """Return the addresses that the gateway would ask."""
    route = routes_now().known(model_name, caller=asker(organization))
    return sorted(upstream.url for upstream in route.upstreams) if route else []


def test_jobs_are_quoted_launched_moved_claimed_and_drained_by_region(world: Regions, claim, reload) -> None:
    floor = world.floor
    waiting, running = floor.job(pool="us-cpu"), floor.job(pool="us-cpu")
    held = claim(world.us_worker)
    assert held is not None and held.run.job_id == waiting.pk and not held.beat().is_drain_requested
    world.limit("eu")

    quotes = quotes_of(world, running)
    assert quotes["local-cpu"].is_launchable
    assert quotes["us-cpu"].block_reason == "Your organization is limited to eu. This pool is in us."
    assert "limited to eu" in refusal(lambda: floor.job(pool="us-cpu"))
    assert floor.job().pool.name == "local-cpu"
    assert claim(world.us_worker) is None, "a queued run is not claimed where it may not be"
    assert held.beat().is_drain_requested, "and a held one is given back with a checkpoint"

    wait = explain_wait(job=reload(running), now=db_now())
    assert wait is not None and (wait.cause, wait.starts_after) == (WaitCause.REGION, None)
    assert wait.reason == "us-cpu is in us, and only pools in eu may run it. Move it to one of these."
    assert [move.quoted.key for move in list_moves(job=reload(running), wait=wait, now=db_now())] == ["local-cpu"]
    in_eu = floor.job(pool="local-cpu")
    assert "limited to eu" in refusal(lambda: move(reload(in_eu), "us-cpu"))
    move(reload(running), "local-cpu")
    assert reload(running).pool.name == "local-cpu"

    world.limit()
    assert not held.beat().is_drain_requested and quotes_of(world, running)["us-cpu"].is_launchable


def test_a_job_that_waits_because_only_other_regions_have_free_gpus_says_so(world: Regions, claim, reload) -> None:
    floor = world.floor
    Worker.objects.filter(pk=floor.worker.pk).update(gpus=floor.worker.gpus[:1])
    floor.job(pool="local-cpu"), claim()
    job = floor.job(pool="local-cpu")
    anywhere = explain_wait(job=reload(job), now=db_now())
    world.limit("eu")

    wait = explain_wait(job=reload(job), now=db_now())
    Worker.objects.filter(pk=world.us_worker.pk).update(cordoned_at=db_now())
    busy = explain_wait(job=reload(job), now=db_now())

    assert anywhere is not None and anywhere.cause is WaitCause.CAPACITY
    assert wait is not None and (wait.cause, wait.position) == (WaitCause.REGION, 1)
    assert wait.reason == "Only pools in eu may run it, and none has enough free GPUs."
    assert wait.starts_after == anywhere.starts_after and wait.starts_after is not None
    assert busy is not None and busy.cause is WaitCause.CAPACITY


def test_a_paused_job_resumes_where_it_may_not_run_only_if_it_can_move(world: Regions, claim, reload) -> None:
    job = world.floor.job(pool="us-cpu")
    attempt = claim(world.us_worker)
    assert attempt is not None
    paused_at(attempt.start(), job, step=5, seconds=9.0)

    world.limit("local")
    nowhere = refusal(lambda: control.resume(job=reload(job), by="user_1", now=db_now()))
    assert nowhere == "region_refused: No pool is in a region that your organization may use: local."
    assert get_balance(organization=world.organization).held_nano == 0

    world.limit("eu")
    control.resume(job=reload(job), by="user_1", now=db_now())
    wait = explain_wait(job=reload(job), now=db_now())
    assert wait is not None and wait.cause is WaitCause.REGION and claim(world.us_worker) is None
    move(reload(job), "local-cpu")
    assert reload(job).pool.name == "local-cpu"


def test_work_on_finished_models_stays_in_the_region(world: Regions, settings) -> None:
    floor, organization, now = world.floor, world.organization, db_now()
    sealed = msgspec.to_builtins(manifest_of("adapter", "run_1", 1, 10, {}))
    version = make_version(organization, floor.base_model, manifest=sealed)
    Examination.objects.create(organization=organization, version=version, asked_at=now)
    conversion = Conversion.objects.create(
        organization=organization, version=version, kind="merged_16bit", created_by="user_1", created_at=now, bytes=1,
        price_nano=0,
    )  # fmt: skip
    world.limit("eu")
    version = type(version).objects.get(pk=version.pk)  # with its organization as it is now
    elsewhere = Worker.objects.select_related("pool").get(pk=world.us_worker.pk)
    here = Worker.objects.select_related("pool").get(pk=floor.worker.pk)
    asked = ConversionClaim()

    assert examinations.take(worker=elsewhere) is None and conversions.take(worker=elsewhere, claim=asked) is None
    taken, examined = conversions.take(worker=here, claim=asked), examinations.take(worker=here)
    assert taken is not None and taken.id == conversion.pk and examined is not None
    conversions.beat(worker=here, conversion_id=conversion.pk)
    settings.HUB_PUSHES = True
    pushed = {"export": "", "repository": "acme/bot", "token": "hf_token-of-a-customer"}
    push = refusal(lambda: request_push(version=version, by="user_1", now=now, **pushed))
    assert push.startswith("region_refused: Your organization is limited to eu, and the hub is in no region.")

    world.limit("local")
    with pytest.raises(StaleLease):
        conversions.beat(worker=here, conversion_id=conversion.pk)
    row = ParityRow(token_ids=(1, 2), tuned=(-1.0,), base=(-2.0,))
    report = ExaminationReport(id=examined.id, probe=ParityProbe(rows=(row,)))
    examinations.record(worker=here, report=report)
    assert Examination.objects.get().worker is None and type(version).objects.get().manifest["files"] == []
    offers = {offer.kind: offer.refusal for offer in list_offers(version=version)}
    conversion.refresh_from_db()
    assert (conversion.status, conversion.failures) == ("waiting", 0), "the trainer has not failed"
    merged = offers["merged_16bit"]
    assert merged is not None and merged.code == "region_refused"


def test_adapters_and_requests_stay_on_replicas_of_the_region(world: Regions, rival: Organization) -> None:
    floor, organization = world.floor, world.organization
    base = floor.base_model
    here, there, leaving = (make_replica(base, f"unix:///{name}") for name in ("eu", "us", "leaving"))
    Replica.objects.filter(pk=there.pk).update(region="us")
    Replica.objects.filter(pk=leaving.pk).update(region="us", draining_at=db_now())
    version, theirs = make_adapter(organization, base), make_adapter(rival, base)
    alias = Alias.objects.create(
        organization=organization, adapter=version.adapter, name="live", model_name=f"{version.model_name}:live",
        version=version, canary_version=version, canary_percent=50,
    )  # fmt: skip
    names = (base.name, version.model_name, alias.model_name)
    assert [asked_at(name, organization) for name in names] == [["unix:///eu", "unix:///us"]] * 3
    world.limit("eu")

    assert [asked_at(name, organization) for name in names] == [["unix:///eu"]] * 3
    assert [asked_at(name, rival) for name in (base.name, theirs.model_name)] == [["unix:///eu", "unix:///us"]] * 2
    replan(base_model_id=base.pk, now=db_now())
    assert list(Placement.objects.filter(adapter_version=version).values_list("replica", flat=True)) == [here.pk]

    Replica.objects.filter(pk=here.pk).update(draining_at=db_now())
    assert asked_at(base.name, organization) == ["unix:///eu"], "a draining one answers what no other may"
    Replica.objects.filter(pk=here.pk).update(is_ready=False)
    sent = refusal(lambda: asyncio.run(routes_now().find(base.name, caller=asker(organization))))
    assert sent.startswith("region_refused: Your organization is limited to eu, and this model is served in us alone.")
    cold = {route.organization_id for route in list_routes() if route.adapter_version_id and route.is_cold}
    assert organization.pk not in cold, "no request brings it back"


def test_replicas_start_where_the_organization_may_be_answered(world: Regions) -> None:
    base, organization = world.floor.base_model, world.organization
    version = make_adapter(organization, base)
    for pool in GpuPool.objects.all():
        ReplicaFleet.objects.create(pool=pool, base_model=base, region_id=pool.region_id, able_at="2100-01-01T00:00Z")

    def started_by(model_name: str) -> set[str]:
        """Return the regions whose fleets a request asks for a replica."""
        routes = routes_now()
        route = routes.require_known(model_name, caller=asker(organization))
        routes.count(route, caller=asker(organization))
        return set(ReplicaFleet.objects.filter(pk__in=routes._asked_fleets).values_list("region", flat=True))

    names = (base.name, version.model_name)
    assert [len(started_by(name)) for name in names] == [1, 1], "one replica is enough"
    there = make_replica(base, "unix:///us")
    Replica.objects.filter(pk=there.pk).update(region="us")
    assert [started_by(name) for name in names] == [{"us"}] * 2, "where it is answered now"
    world.limit("eu")
    assert [started_by(name) for name in names] == [{"eu"}] * 2

    Replica.objects.filter(pk=there.pk).delete()
    set_price(sku=f"warm:{base.name}", unit="warm_ms", price_nano=1, per=1, by="system", now=db_now())
    Deployment.objects.filter(adapter_version=version).update(pinned_at=db_now())
    assert {region for region in ("eu", "us") if starts_without_requests(region)} == {"eu"}, "it is kept warm"
    ReplicaFleet.objects.filter(region="eu").update(maximum=0)
    sent = refusal(lambda: asyncio.run(routes_now().find(base.name, caller=asker(organization))))
    assert sent.startswith("region_refused: Your organization is limited to eu, and this model is served in us alone.")


def starts_without_requests(region: str) -> bool:
    pool = GpuPool.objects.get(region=region)
    capacity, _ = PoolCapacity.objects.get_or_create(pool=pool, defaults={"kind": "slurm"})
    with transaction.atomic():
        fleets = lock_fleets(pool_id=pool.pk)
        plan = plan_fleets(fleets, capacity=capacity, nodes=[], may_start=True, most_new=5, now=db_now())
    return bool(plan.new)


def test_a_whole_model_gets_no_replica_elsewhere_and_loses_the_one_it_has(world: Regions) -> None:
    version = make_whole_model(world.organization, world.floor.base_model)
    GpuPool.objects.update(serves_whole_models=True)
    replica = make_replica(world.floor.base_model, "unix:///own")
    Replica.objects.filter(pk=replica.pk).update(region="us", whole_model=version)
    load(version, replica)
    assert desired_state(replica=Replica.objects.get(pk=replica.pk)).model_files
    world.limit("eu")

    desired = desired_state(replica=Replica.objects.get(pk=replica.pk))
    us = GpuPool.objects.get(pk=world.us.pk)
    token = {"kind": "replica", "base_model": None, "whole_model": version, "by": "user_operator"}

    assert (desired.model_files, desired.is_withdrawn) == ((), True)
    assert "limited to eu, and the pool is in us" in refusal(lambda: issue_worker_token(pool=us, **token))
    assert "limited" not in refusal(lambda: issue_worker_token(pool=GpuPool.objects.get(region="eu"), **token))


def test_without_the_region_of_the_object_store_nothing_is_stored(world: Regions) -> None:
    floor, organization, now = world.floor, world.organization, db_now()
    file = {"filename": "rows.jsonl", "by": "user_1", "now": now}
    member = Membership.objects.filter(organization=organization).earliest("created_at")
    stored = make_training_file(organization, floor.base_model)
    files = adapter_files(floor.base_model)
    adapter = {"config": [files["adapter_config.json"]], "weights": [files["adapter_model.safetensors"]]}
    paths: dict[str, Callable[[], object]] = {
        "a file": lambda: create_version(organization=organization, purpose="fine-tune", chunks=[b"{}"], **file),
        "an upload": lambda: create_upload(
            organization=organization, purpose="fine-tune", bytes=9, mime_type="text/jsonl", **file
        ),
        "a batch's file": lambda: create_file(organization=organization, chunks=[b"{}"], **file),
        "a batch": lambda: create_batch(
            organization=organization, input_file_id="file-1", endpoint="/v1/chat/completions", by="user_1", now=now
        ),
        "an eval": lambda: create_eval(
            organization=organization, name="e", data_source_config={}, criteria=[], metadata={}, by="user_1"
        ),
        "an adapter": lambda: upload_adapter(
            organization=organization, name="mine", by="user_1", now=now, base_model=floor.base_model.name, **adapter
        ),
        "a completion": lambda: get_allowance(organization=organization),
        "a job": lambda: floor.job(),
        "a conversation": lambda: keep_conversation(membership=member, transcript=Transcript(), now=now),
        "a preset": lambda: save_preset(
            membership=member, name="mine", is_shared=False, settings=PlaySettings(), now=now
        ),
    }
    world.limit("us")
    organization.refresh_from_db()

    refused = {name: refusal(path) for name, path in paths.items()}

    words = "region_refused: Files are stored in eu here, and your organization is limited to us."
    assert refused == dict.fromkeys(paths, words)
    assert stored.status == "ready"


def test_operators_alone_limit_an_organization_and_both_logs_say_so(world: Regions) -> None:
    organization = world.organization
    with pytest.raises(InvalidValue, match=r"no region named 'mars'\. Choose from: eu, local, us\."):
        world.limit("eu", "mars")
    with pytest.raises(InvalidValue, match=r"A region named 'EU' already exists\."):
        create_region(name="EU", by="user_operator")
    with pytest.raises(InvalidValue, match="no region named 'mars'"):
        edit_pool(pool=world.us, region="mars", memory_bytes=1, is_open=True, by="user_operator")
    world.limit("us", "eu")
    world.limit("eu", "us")

    entries = AuditEntry.objects.filter(action="organization.regions_set", target=organization.pk)
    assert sorted(entries.values_list("organization_id", "details__after"), key=str) == sorted(
        [(None, ["eu", "us"]), (organization.pk, ["eu", "us"])], key=str
    )
    with (
        tenant(organization=organization.pk),
        pytest.raises(DatabaseError, match=r"may not set accounts_organization\.regions"),
        transaction.atomic(),
    ):
        Organization.objects.filter(pk=organization.pk).update(regions=None)
