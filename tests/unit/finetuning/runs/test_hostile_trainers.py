"""A trainer that was taken over can spoil the result of the run it holds and nothing beyond."""

import datetime
import hashlib
import itertools
import json
import threading
from collections.abc import Callable

import msgspec
import pytest
from django.core.handlers.asgi import ASGIRequest
from django.test import AsyncRequestFactory

from apps.contracts import runs as wire
from apps.contracts.runs import Manifest
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.http.turns import CALLER
from apps.core.models import OutboxMessage
from apps.core.objects.readings import FilesUnread
from apps.core.objects.store import read_object, store
from apps.finetuning.models import Checkpoint, FineTuningJob, RunMember, RunUpload
from apps.finetuning.runs import leases, uploads
from apps.finetuning.runs.reports import record_events
from apps.interfaces.worker_api import views
from tests.factories.finetuning import (
    CREDENTIAL,
    TrainingSetup,
    adapter_files,
    checkpoint_files,
    make_worker,
    manifest_of,
    model_files,
)
from tests.support.attempts import Attempt, charged, key_of
from tests.support.waiting import join_readings

WHOLE = model_files()
PICKLE = b"\x80\x04\x95\x00\x00\x00\x00{.."


@pytest.fixture
def whole(floor: TrainingSetup, claim) -> Attempt:
    """An attempt at full training, whose result is a model."""
    job = floor.job()
    recipe = job.hyperparameters | {"method": "full"}
    FineTuningJob.objects.filter(pk=job.pk).update(method="full", hyperparameters=recipe)
    return claim().start()


def announce(attempt: Attempt, manifest: Manifest) -> None:
    digest = hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()
    uploads.create_upload(lease=attempt.lease, manifest=manifest, manifest_sha256=digest)


def succeeded(upload: RunUpload, **fields) -> wire.Succeeded:
    return wire.Succeeded(upload_id=upload.pk, manifest_sha256=upload.manifest_sha256, step=10, **fields)


NO_NAMES = (
    "pytorch_model.bin", "model.pkl", "modeling_evil.py", "../config.json", "/etc/passwd", "sub/config.json", "",
    "config.json\n", ".hidden.safetensors", "run.sh", "manifest.json", "adapter_model.bin", "a" * 300 + ".safetensors",
)  # fmt: skip


def test_a_file_of_another_name_gets_no_place(attempt):
    spec = attempt.claimed.spec

    for kind, name in itertools.product(("adapter", "model", "checkpoint"), NO_NAMES):
        with pytest.raises(InvalidValue) as refused:
            announce(attempt, manifest_of(kind, spec.run_id, spec.attempt, 1, {name: b"x"}))
            pytest.fail(f"a {kind} with {name!r} got a place")

        assert refused.value.param == "manifest.files", (kind, name)
        assert not RunUpload.objects.exists(), (kind, name)


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_what_torch_pickles_is_in_checkpoints_alone(attempt, kind):
    spec = attempt.claimed.spec

    with pytest.raises(InvalidValue):
        announce(attempt, manifest_of(kind, spec.run_id, spec.attempt, 1, {"optimizer.pt": b"x"}))
    announce(attempt, manifest_of("checkpoint", spec.run_id, spec.attempt, 1, {"optimizer.pt": b"x"}))


def test_a_manifest_is_of_this_attempt_and_of_a_size_its_base_model_can_have(attempt):
    spec = attempt.claimed.spec
    manifest = manifest_of("adapter", spec.run_id, spec.attempt, 1, {"adapter_config.json": b"{}"})
    sizes = [(msgspec.structs.replace(manifest.files[0], bytes=size),) for size in (2**60, -1)]

    for changes in (
        {"run_id": "run_another"}, {"attempt": 7}, {"kind": "dataset"}, {"metadata": {"x": "y" * 20_000}},
        *({"files": each} for each in [(), *sizes]),
    ):  # fmt: skip
        with pytest.raises(InvalidValue):
            announce(attempt, msgspec.structs.replace(manifest, **changes))
            pytest.fail(f"{changes} was taken")


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


def test_large_files_are_read_outside_of_requests_so_that_no_call_waits(whole, reload, monkeypatch):
    go_on, hash_object = threading.Event(), uploads.hash_object
    monkeypatch.setattr(uploads, "READ_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(uploads, "hash_object", lambda key: go_on.wait(60) and hash_object(key))
    upload = whole.upload("model", 10, WHOLE)

    for _ in range(2):
        with pytest.raises(FilesUnread):
            whole.finish(succeeded(upload))
    whole.beat()
    go_on.set()
    join_readings()
    whole.finish(succeeded(upload))

    assert reload(FineTuningJob.objects.get()).status == "succeeded"


def test_a_run_keeps_few_uploads_that_no_checkpoint_refers_to(floor, claim):
    floor.job()
    attempt = claim().start()
    attempt.checkpoint(step=4, seconds=8.0)
    made = [attempt.upload("checkpoint", step, checkpoint_files()) for step in range(5, 13)]

    with pytest.raises(InvalidValue, match="8 uploads that no checkpoint uses"):
        attempt.upload("checkpoint", 13, checkpoint_files())
    RunUpload.objects.filter(pk=made[0].pk).update(created_at=db_now() - uploads._WRITTEN)
    newest = attempt.upload("checkpoint", 13, checkpoint_files())

    there = set(RunUpload.objects.values_list("pk", flat=True))
    assert there == {Checkpoint.objects.get().upload_id, newest.pk, *(upload.pk for upload in made[1:])}
    swept = OutboxMessage.objects.filter(topic="objects.delete").values_list("key", flat=True)
    assert list(swept) == [f"delete:{made[0].pk}"]


def test_the_tokens_of_a_trainers_leases_and_places_count_as_its_own(floor, claim):
    floor.job()
    attempt = claim()
    other = make_worker(floor.pool, credential="annw_other")
    RunMember.objects.create(
        organization=floor.organization, run=attempt.run, rank=1, worker=other, address="here", heartbeat_at=db_now(),
        token_sha256=leases.sha256_hex("place"), handed_at=db_now(),
    )  # fmt: skip

    def caller(identify: Callable[[ASGIRequest], object], token: str) -> str | None:
        request = AsyncRequestFactory().post("/", headers={"Authorization": f"Bearer {token}"})
        identify(request)
        return request.scope.get(CALLER)

    def under_lease(request: ASGIRequest) -> object:
        return views._lease(request, attempt.lease.id)

    mine = floor.worker.pk
    assert [caller(views._worker, CREDENTIAL), caller(under_lease, attempt.lease.token)] == [mine, mine]
    assert (caller(under_lease, "place"), caller(under_lease, "made up")) == (other.pk, None)


def test_the_files_of_checkpoints_are_looked_for_outside_of_requests_and_once(floor, claim, monkeypatch):
    job, seen = floor.job(), []
    attempt, stat = claim().start(), store().stat
    monkeypatch.setattr(type(store()), "stat", lambda _, key: seen.append(key) or stat(key))
    files = {f"part-{number}.safetensors": b"x" for number in range(uploads.READ_AT_ONCE_FILES // 2 + 1)}
    first, second = (attempt.upload("checkpoint", step, files) for step in (4, 8))
    saved = [
        wire.CheckpointSaved(
            sequence=number, step=upload.manifest["step"], upload_id=upload.pk, bytes=1, trained_tokens=1,
            manifest_sha256=upload.manifest_sha256, training_seconds=1.0,
        )
        for number, upload in enumerate((first, second), start=attempt.sequence + 1)
    ]  # fmt: skip
    del seen[:]

    with pytest.raises(FilesUnread):
        record_events(lease=attempt.lease, reported=tuple(saved))
    attempt.beat()
    join_readings()
    record_events(lease=attempt.lease, reported=tuple(saved))
    del seen[:]
    record_events(lease=attempt.lease, reported=tuple(saved))

    assert job.checkpoints.count() == 2 and seen == []


def test_a_checkpoint_that_lacks_a_file_is_none(floor, claim):
    job, attempt = floor.job(), claim().start()
    upload = attempt.upload("checkpoint", 4, checkpoint_files())
    store().delete(f"{upload.object_prefix}/{upload.manifest['files'][0]['name']}")

    with pytest.raises(uploads.UploadIncomplete, match="was not uploaded"):
        attempt.report(
            wire.CheckpointSaved, step=4, upload_id=upload.pk, manifest_sha256=upload.manifest_sha256, bytes=1,
            trained_tokens=1, training_seconds=1.0,
        )  # fmt: skip

    assert not job.checkpoints.exists()


def test_a_large_file_of_another_content_is_refused_once_it_was_read(whole, monkeypatch):
    monkeypatch.setattr(uploads, "READ_AT_ONCE_BYTES", 0)
    upload = whole.upload("model", 10, WHOLE)
    store().put_stream(f"{upload.object_prefix}/model.safetensors", [WHOLE["model.safetensors"][::-1]])

    with pytest.raises(FilesUnread):
        whole.finish(succeeded(upload))
    join_readings()
    with pytest.raises(uploads.UploadIncomplete, match="another content"):
        whole.finish(succeeded(upload))


def test_a_large_file_is_joined_from_parts_that_no_url_replaces_afterwards(whole, reload, monkeypatch):
    content = WHOLE["model.safetensors"]
    monkeypatch.setattr(uploads, "PART_BYTES", len(content) - 1)
    upload = whole.upload("model", 10, WHOLE)
    joined, parts = f"{upload.object_prefix}/model.safetensors", f"{upload.object_prefix}/parts"
    manifest = msgspec.convert(upload.manifest, Manifest)
    places = uploads.sign_places(upload, manifest)
    first, last = (key_of(url) for url in places.parts["model.safetensors"])

    store().delete(last)
    with pytest.raises(uploads.UploadIncomplete, match="was not uploaded"):
        whole.finish(succeeded(upload))
    store().put_stream(last, [content[-1:]])
    whole.finish(succeeded(upload))

    assert reload(FineTuningJob.objects.get()).status == "succeeded"
    assert read_object(joined) == content
    sweep = OutboxMessage.objects.get(topic="objects.delete")
    assert sweep.payload == {"prefix": parts} and first.startswith(parts)
    assert sweep.next_attempt_at > db_now() + datetime.timedelta(seconds=uploads._PUT_SECONDS)
    upload.refresh_from_db()
    assert uploads.sign_places(upload, manifest).parts == {"model.safetensors": ()}, "one can come after the deletion"


@pytest.mark.parametrize("part_bytes", [len(WHOLE["model.safetensors"]) - 1, len(WHOLE["model.safetensors"])])
def test_a_worker_that_knows_no_parts_stores_a_file_whole(whole, monkeypatch, part_bytes):
    upload, manifest = whole.upload("model", 10, WHOLE), manifest_of("model", whole.run.pk, 1, 10, WHOLE)
    monkeypatch.setattr(uploads, "PART_BYTES", part_bytes)

    assert key_of(uploads.sign_places(upload, manifest).files["model.safetensors"]).startswith(upload.object_prefix)
    whole.finish(succeeded(upload))

    assert FineTuningJob.objects.get().status == "succeeded"
    is_large = part_bytes < len(WHOLE["model.safetensors"])
    assert OutboxMessage.objects.filter(topic="objects.delete").exists() is is_large


def test_parts_of_another_content_are_refused(whole, monkeypatch):
    monkeypatch.setattr(uploads, "PART_BYTES", len(WHOLE["model.safetensors"]) - 1)
    upload = whole.upload("model", 10, WHOLE)
    changed = bytes([WHOLE["model.safetensors"][-1] ^ 1])
    store().put_stream(f"{upload.object_prefix}/parts/model.safetensors/00002", [changed])

    with pytest.raises(uploads.UploadIncomplete, match="another content"):
        whole.finish(succeeded(upload))


def test_exports_that_nobody_can_have_asked_for_are_not_read(whole, monkeypatch):
    monkeypatch.setattr(uploads, "hash_object", lambda key: pytest.fail(f"{key} was read"))
    upload = whole.upload("model", 10, WHOLE)
    export = wire.Export(kind="gguf", upload_id=upload.pk, manifest_sha256=upload.manifest_sha256)

    with pytest.raises(InvalidValue):
        whole.finish(succeeded(upload, exports=(export,) * 3))


@pytest.mark.parametrize("is_dora", [True, False])
def test_a_result_whose_only_delivery_is_missing_fails_unless_it_was_made(floor, organization, claim, reload, is_dora):
    job = floor.job()
    recipe = job.hyperparameters | {"use_dora": is_dora}
    FineTuningJob.objects.update(hyperparameters=recipe, requested={"exports": ["merged_16bit"]})
    if not is_dora:  # an architecture whose adapters no engine loads
        config = floor.base_model.config | {"architectures": ["NemotronForCausalLM"]}
        type(floor.base_model).objects.update(config=config)
    attempt = claim().start()
    attempt.checkpoint(step=5, seconds=20.0)
    unstored = wire.MissingPart(kind="merged_16bit", cause="it was made, but the store answered 403", is_made=True)
    attempt.succeed(floor.base_model, missing=(unstored,))
    assert (reload(job).status, attempt.run.failure_code) == ("queued", "object_store_unavailable")
    missing = wire.MissingPart(kind="merged_16bit", cause="the disk was full")

    claim().start().succeed(floor.base_model, missing=(missing,))

    job = reload(job)
    assert (job.status, job.error_code, job.cost_nano, charged(organization)) == ("failed", "delivery_failed", 0, 0)
    assert "the disk was full" in job.error_message
    assert job.checkpoints.filter(deleted_at=None).count() == 1


def test_the_merged_model_of_an_architecture_without_adapters_is_delivered(floor, claim, reload):
    job = floor.job()
    FineTuningJob.objects.update(requested={"exports": ["merged_16bit"]})
    config = floor.base_model.config | {"architectures": ["NemotronForCausalLM"]}
    type(floor.base_model).objects.update(config=config)
    attempt = claim().start()
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
        {"target_modules": [["q_proj"], {}]},
        {"lora_alpha": 10**400},
        {"base_model_name_or_path": None},
    ],
)
def test_an_adapter_that_has_peft_load_another_model_is_not_published(floor, claim, reload, is_dora, changes):
    job = floor.job()
    recipe = job.hyperparameters | {"use_dora": is_dora}
    FineTuningJob.objects.update(hyperparameters=recipe, requested={"exports": ["merged_16bit"]})
    attempt = claim().start()
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

    with pytest.raises(InvalidValue, match="not requested"):
        attempt.finish(succeeded(upload, exports=exports))
