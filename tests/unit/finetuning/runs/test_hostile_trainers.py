"""A trainer that was taken over can spoil the run it holds and nothing beyond: files, time, numbers, secrets."""

import datetime
import hashlib
import json

import msgspec
import pytest
from django.db.models import F
from django.test import Client

from apps.catalog.operations import keep_hub_token
from apps.contracts import runs as wire
from apps.contracts.runs import Manifest
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, InvalidValue, RateLimited
from apps.core.objects.store import store
from apps.finetuning.models import FineTuningJob, JobEvent, Run, RunUpload, ThroughputProbe, Worker
from apps.finetuning.runs import reports, uploads
from tests.factories.catalog import make_base_model
from tests.factories.finetuning import CREDENTIAL, TrainingSetup, adapter_files, manifest_of, model_files, probe_report
from tests.support.attempts import Attempt, charged, step

WHOLE = model_files()
PICKLE = b"\x80\x04\x95\x00\x00\x00\x00{.."


@pytest.fixture
def attempt(floor: TrainingSetup, claim) -> Attempt:
    floor.job()
    found = claim()
    found.start()
    return found


@pytest.fixture
def whole(floor: TrainingSetup, claim) -> Attempt:
    """An attempt at full training, whose result is a model."""
    job = floor.job()
    recipe = job.hyperparameters | {"method": "full"}
    FineTuningJob.objects.filter(pk=job.pk).update(method="full", hyperparameters=recipe)
    found = claim()
    found.start()
    return found


def announce(attempt: Attempt, manifest: Manifest) -> None:
    digest = hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()
    uploads.create_upload(lease=attempt.lease, manifest=manifest, manifest_sha256=digest)


def succeeded(upload: RunUpload, **fields) -> wire.Succeeded:
    return wire.Succeeded(upload_id=upload.pk, manifest_sha256=upload.manifest_sha256, step=10, **fields)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adapter", "model", "checkpoint"])
@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin", "model.pkl", "modeling_evil.py", "../config.json", "/etc/passwd", "sub/config.json", "",
        "config.json\n", ".hidden.safetensors", "run.sh", "manifest.json", "adapter_model.bin",
        "a" * 300 + ".safetensors",
    ],
)  # fmt: skip
def test_a_file_of_another_name_gets_no_place(attempt, kind, name):
    spec = attempt.claimed.spec

    with pytest.raises(InvalidValue) as refused:
        announce(attempt, manifest_of(kind, spec.run_id, spec.attempt, 1, {name: b"x"}))

    assert refused.value.param == "manifest.files"
    assert not RunUpload.objects.exists()


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_what_torch_pickles_is_in_checkpoints_alone(attempt, kind):
    spec = attempt.claimed.spec

    with pytest.raises(InvalidValue):
        announce(attempt, manifest_of(kind, spec.run_id, spec.attempt, 1, {"optimizer.pt": b"x"}))
    announce(attempt, manifest_of("checkpoint", spec.run_id, spec.attempt, 1, {"optimizer.pt": b"x"}))


@pytest.mark.parametrize(
    "changes",
    [{"run_id": "run_another"}, {"attempt": 7}, {"files": ()}, {"kind": "dataset"}, {"bytes": 2**60}, {"bytes": -1}],
)
def test_a_manifest_is_of_this_attempt_and_of_a_size_its_base_model_can_have(attempt, changes):
    spec = attempt.claimed.spec
    manifest = manifest_of("adapter", spec.run_id, spec.attempt, 1, {"adapter_config.json": b"{}"})
    if "bytes" in changes:
        changes = {"files": (msgspec.structs.replace(manifest.files[0], **changes),)}

    with pytest.raises(InvalidValue):
        announce(attempt, msgspec.structs.replace(manifest, **changes))


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_every_file_of_a_whole_model_is_hashed(whole, reload, name):
    upload = whole.upload("model", 10, WHOLE)
    changed = WHOLE[name][:-1] + bytes([WHOLE[name][-1] ^ 1])
    store().put_stream(f"{upload.object_prefix}/{name}", [changed])

    with pytest.raises(uploads.UploadIncomplete, match=name):
        whole.finish(succeeded(upload))

    assert whole.run.status == "running"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (WHOLE | {"model.safetensors": PICKLE}, "no safetensors"),
        (WHOLE | {"model.safetensors": b"PK\x03\x04" + bytes(9)}, "no safetensors"),
        (WHOLE | {"config.json": b'{"auto_map": {"AutoModel": "evil.Model"}}'}, "names code"),
        (WHOLE | {"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["evil.T", null]}}'}, "names code"),
        (WHOLE | {"config.json": b"[" * 50_000}, "no JSON"),
        (WHOLE | {"model.gguf": PICKLE}, "no GGUF"),
    ],
)
def test_a_whole_model_that_could_run_code_is_not_published(whole, reload, files, said):
    job = FineTuningJob.objects.get()
    whole.finish(succeeded(whole.upload("model", 10, files)))

    job = reload(job)
    assert (job.status, job.adapter_version) == ("failed", None)
    assert said in job.events.order_by("-sequence").first().message


def test_a_whole_model_is_published_after_one_reading(whole, reload, monkeypatch):
    upload, read = whole.upload("model", 10, WHOLE), []
    hash_object = uploads.hash_object
    monkeypatch.setattr(uploads, "hash_object", lambda key: read.append(key) or hash_object(key))

    whole.finish(succeeded(upload))

    assert len(read) == len(WHOLE)
    assert FineTuningJob.objects.get().adapter_version.status == "files_only"


@pytest.mark.parametrize("is_dora", [True, False])
def test_a_result_whose_only_delivery_is_missing_fails_unbilled(floor, organization, claim, reload, is_dora):
    job = floor.job()
    recipe = job.hyperparameters | {"use_dora": is_dora}
    FineTuningJob.objects.update(hyperparameters=recipe, requested={"exports": ["merged_16bit"]})
    if not is_dora:  # an architecture whose adapters no engine loads
        config = floor.base_model.config | {"architectures": ["Olmo2ForCausalLM"]}
        type(floor.base_model).objects.update(config=config)
    attempt = claim()
    attempt.start()
    attempt.checkpoint(step=5, seconds=20.0)
    missing = wire.MissingPart(kind="merged_16bit", cause="the disk was full")

    attempt.succeed(floor.base_model, missing=(missing,))

    job = reload(job)
    assert (job.status, job.error_code, job.cost_nano, charged(organization)) == ("failed", "delivery_failed", 0, 0)
    assert "the disk was full" in job.error_message
    assert job.checkpoints.filter(deleted_at=None).count() == 1


def test_the_merged_model_of_an_architecture_without_adapters_is_delivered(floor, claim, reload):
    job = floor.job()
    FineTuningJob.objects.update(requested={"exports": ["merged_16bit"]})
    config = floor.base_model.config | {"architectures": ["Olmo2ForCausalLM"]}
    type(floor.base_model).objects.update(config=config)
    attempt = claim()
    attempt.start()
    merged = attempt.upload("model", 10, WHOLE)
    export = wire.Export(kind="merged_16bit", upload_id=merged.pk, manifest_sha256=merged.manifest_sha256)

    attempt.succeed(floor.base_model, exports=(export,))

    job = reload(job)
    assert (job.status, job.adapter_version.status) == ("succeeded", "files_only")


@pytest.mark.parametrize("is_dora", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {"base_model_name_or_path": "evil/model"},
        {"base_model_name_or_path": "anneal-demo"},
        {"auto_mapping": {"base_model_class": "X", "parent_library": "evil"}},
        {"revision": "refs/pr/1"},
        {"base_model_name_or_path": None},
    ],
)
def test_an_adapter_that_has_peft_load_another_model_is_not_published(floor, claim, reload, is_dora, changes):
    job = floor.job()
    recipe = job.hyperparameters | {"use_dora": is_dora}
    FineTuningJob.objects.update(hyperparameters=recipe, requested={"exports": ["merged_16bit"]})
    attempt = claim()
    attempt.start()
    merged = attempt.upload("model", 10, WHOLE)
    export = wire.Export(kind="merged_16bit", upload_id=merged.pk, manifest_sha256=merged.manifest_sha256)
    files = adapter_files(floor.base_model)
    config = json.loads(files["adapter_config.json"]) | changes

    attempt.succeed(
        floor.base_model, files=files | {"adapter_config.json": json.dumps(config).encode()}, exports=(export,)
    )

    job = reload(job)
    assert (job.status, job.error_code, job.adapter_version) == ("failed", "adapter_rejected", None)


def test_a_checkpoint_or_anothers_upload_is_no_result(attempt, floor, claim):
    checkpoint = attempt.upload("checkpoint", 5, {"optimizer.pt": PICKLE})
    floor.job()
    other = Attempt(claim().claimed)
    theirs = other.upload("adapter", 10, adapter_files(floor.base_model))

    for upload in (checkpoint, theirs):
        with pytest.raises(InvalidValue, match="No upload of this run"):
            attempt.finish(succeeded(upload))


@pytest.mark.parametrize("kinds", [("gguf",), ("merged_16bit", "merged_16bit"), ("anything",)])
def test_only_the_exports_that_were_asked_for_are_kept(attempt, floor, kinds):
    FineTuningJob.objects.update(requested={"exports": ["merged_16bit"]})
    upload = attempt.upload("adapter", 10, adapter_files(floor.base_model))
    merged = attempt.upload("model", 10, WHOLE)
    exports = tuple(
        wire.Export(kind=kind, upload_id=merged.pk, manifest_sha256=merged.manifest_sha256) for kind in kinds
    )

    with pytest.raises(InvalidValue, match="not asked for"):
        attempt.finish(succeeded(upload, exports=exports))


# --- time, numbers and floods -----------------------------------------------------------------------------------------


def test_no_more_time_is_billed_than_passed(attempt, floor, reload):
    Run.objects.update(training_started_at=db_now() - datetime.timedelta(seconds=20))

    attempt.succeed(floor.base_model, seconds=1e8)

    assert 20_000 <= FineTuningJob.objects.get().billed_gpu_ms < 60_000


def test_a_heartbeat_that_claims_years_pauses_nothing(attempt):
    Run.objects.update(training_started_at=db_now())

    assert not attempt.beat(training_seconds=9e8).is_pause_requested


def test_events_beyond_any_pace_are_refused_and_not_kept(attempt):
    before = JobEvent.objects.count()

    for sequence in (10**6, 2**53):
        with pytest.raises(RateLimited):
            line = wire.LogLine(sequence=sequence, level="info", message="x")
            reports.record_events(lease=attempt.lease, reported=(line,))
    assert JobEvent.objects.count() == before

    Run.objects.update(leased_at=F("leased_at") - datetime.timedelta(days=1))
    reports.record_events(lease=attempt.lease, reported=(wire.LogLine(sequence=10**6, level="info", message="x"),))
    assert JobEvent.objects.count() == before + 1


def test_a_line_of_any_length_is_cut(attempt):
    attempt.report(wire.LogLine, level="shout", message="x" * 10**6)

    event = JobEvent.objects.order_by("-sequence").first()
    assert (len(event.message), event.level) == (1000, "info")


def post(path: str, body: bytes, secret: str) -> tuple[int, dict]:
    answer = Client().post(
        f"/internal/v1/{path}", body, content_type="application/json", headers={"Authorization": f"Bearer {secret}"}
    )
    return answer.status_code, json.loads(answer.content or b"{}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1), ("step", 2**40), ("trained_tokens", 2**70), ("trained_tokens", -5), ("training_seconds", -1),
        ("training_seconds", 1e30), ("tokens_per_second", -3), ("memory_bytes", -1), ("total_steps", 2**31),
        ("train_loss", "NaN"), ("sequence", -1),
    ],
)  # fmt: skip
def test_numbers_that_no_machine_has_are_refused(attempt, settings, field, value):
    settings.ROOT_URLCONF = "apps.config.urls_internal"
    event = {"type": "step_completed", "sequence": attempt.sequence + 1} | step(1, 2.0) | {field: value}

    status, answer = post(
        f"leases/{attempt.lease.id}/events", json.dumps({"events": [event]}).encode(), attempt.lease.token
    )

    assert (status, field in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"[" * 200_000, 400), (b'{"events": []}' + b" " * 3 * 2**20, 413), (b"\xff", 400), (b"", 400)],
)
def test_bodies_that_are_too_deep_or_too_large_are_refused(attempt, settings, body, status):
    settings.ROOT_URLCONF = "apps.config.urls_internal"

    assert post(f"leases/{attempt.lease.id}/events", body, attempt.lease.token)[0] == status


def test_a_line_with_nul_is_kept_without_it(attempt, settings):
    settings.ROOT_URLCONF = "apps.config.urls_internal"
    line = r'{"type":"log_line","sequence":%d,"level":"info","message":"a\u0000\u0000 b \\u0000 \\\u0000"}'
    body = b'{"events": [%b]}' % (line % (attempt.sequence + 1)).encode()

    assert post(f"leases/{attempt.lease.id}/events", body, attempt.lease.token)[0] == 200
    assert JobEvent.objects.order_by("-sequence").first().message == "a\ufffd\ufffd b \\u0000 \\\ufffd"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens_per_second": 1e30}, {"tokens_per_second": 0}, {"tokens_per_second": -1}, {"peak_memory_bytes": 2**60},
        {"seconds_per_micro_step": -1}, {"startup_seconds": 1e12}, {"software": {"torch": "x" * 1000}},
    ],
)  # fmt: skip
def test_measurements_that_no_machine_makes_are_refused(floor, settings, changes):
    settings.ROOT_URLCONF = "apps.config.urls_internal"
    report = msgspec.to_builtins(probe_report(floor.base_model)) | changes

    assert post("probes", json.dumps(report).encode(), CREDENTIAL)[0] == 400


def test_a_worker_that_measures_without_end_is_stopped_and_a_replica_measures_nothing(floor, settings, monkeypatch):
    settings.ROOT_URLCONF = "apps.config.urls_internal"
    monkeypatch.setattr("apps.interfaces.worker_api.probes._MAX_A_DAY", ThroughputProbe.objects.count() + 1)
    body = msgspec.json.encode(probe_report(floor.base_model))

    answers = [post("probes", body, CREDENTIAL)[0] for _ in range(2)]
    Worker.objects.update(kind="replica")

    assert (answers, post("probes", body, CREDENTIAL)[0]) == ([204, 429], 403)


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gated(floor: TrainingSetup):
    """A model whose repository asks for a token, not measured yet in the pool."""
    model = floor.base_model
    ThroughputProbe.objects.all().delete()
    model.repo, model.path, model.is_gated = "owner/gated", "", True
    model.save()
    keep_hub_token(base_model=model, hub_token="hf_secret")
    return model


def tokens(query: str = "") -> set[str | None]:
    answer = Client().get(f"/internal/v1/probes/missing{query}", headers={"Authorization": f"Bearer {CREDENTIAL}"})
    return {probe["base_model"].get("hub_token") for probe in json.loads(answer.content)["probes"]}


def test_a_hub_token_goes_to_the_trainer_that_is_about_to_measure(gated, settings):
    settings.ROOT_URLCONF = "apps.config.urls_internal"

    assert tokens() == {None}
    assert tokens("?base_model=another") == {None}
    assert tokens(f"?base_model={gated.pk}") == {"hf_secret"}


def test_a_trainer_gets_no_second_hub_token_before_it_reported_the_first_or_long_after(gated, settings):
    settings.ROOT_URLCONF = "apps.config.urls_internal"
    other = make_base_model("other")
    type(gated).objects.filter(pk=other.pk).update(repo="owner/other", path="", is_gated=True)
    keep_hub_token(base_model=other, hub_token="hf_other")
    path, credential = "/internal/v1/probes/missing?base_model=", {"Authorization": f"Bearer {CREDENTIAL}"}

    assert tokens(f"?base_model={gated.pk}") == tokens(f"?base_model={gated.pk}") == {"hf_secret", None}
    assert Client().get(path + other.pk, headers=credential).status_code == 429
    post("probes", msgspec.json.encode(probe_report(other, "lora")), CREDENTIAL)
    assert Client().get(path + other.pk, headers=credential).status_code == 429  # another model's report ends nothing
    post("probes", msgspec.json.encode(probe_report(gated, "lora")), CREDENTIAL)
    assert tokens(f"?base_model={other.pk}") == {"hf_other", None}

    Worker.objects.update(measuring_since=F("measuring_since") - datetime.timedelta(minutes=31))
    assert tokens(f"?base_model={gated.pk}") == {"hf_secret", None}


@pytest.mark.parametrize(
    "state", [{"kind": "replica"}, {"cordoned_at": "2026-11-01T00:00Z"}, {"drain_requested_at": "2026-11-01T00:00Z"}]
)
def test_a_machine_that_takes_no_work_gets_no_hub_token(gated, settings, state):
    settings.ROOT_URLCONF = "apps.config.urls_internal"
    Worker.objects.update(**state)

    assert tokens(f"?base_model={gated.pk}") == set()


def test_nor_does_one_of_a_closed_pool_or_one_that_measured_it(gated, floor, settings):
    settings.ROOT_URLCONF = "apps.config.urls_internal"
    post("probes", msgspec.json.encode(probe_report(gated, "lora")), CREDENTIAL)
    post("probes", msgspec.json.encode(probe_report(gated, "qlora")), CREDENTIAL)
    measured = tokens(f"?base_model={gated.pk}")
    ThroughputProbe.objects.all().delete()
    floor.pool.is_open = False
    floor.pool.save()

    assert (measured, tokens(f"?base_model={gated.pk}")) == (set(), set())


def test_nothing_refused_leaves_the_run_unable_to_go_on(attempt, floor):
    with pytest.raises(DomainError):
        reports.record_events(lease=attempt.lease, reported=(wire.LogLine(sequence=10**9, level="info", message="x"),))

    attempt.succeed(floor.base_model)

    assert FineTuningJob.objects.get().status == "succeeded"
