"""Uploads of a run: signed URLs for the files of a manifest, and the checks that a complete upload passes."""

import datetime
import hashlib
from collections.abc import Collection, Iterator
from functools import partial

import msgspec
from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet

from apps.contracts.result_files import problem_of
from apps.contracts.runs import Manifest, ManifestFile
from apps.contracts.worker_api import UploadResponse
from apps.core.database.clock import db_now
from apps.core.errors import DomainError, InvalidValue
from apps.core.messages import outbox
from apps.core.objects.readings import FilesUnread, readings
from apps.core.objects.store import PART_BYTES, ObjectMissing, hash_object, object_key, read_object, store
from apps.finetuning.models import Checkpoint, Conversion, Run, RunUpload
from apps.finetuning.results.retention import delete_upload
from apps.finetuning.runs.leases import Lease, lock_run, sha256_hex

MANIFEST_NAME = "manifest.json"
_PARTS = "parts"  # the folder of the parts of large files
READ_AT_ONCE_BYTES, READ_AT_ONCE_FILES = 32 * 2**20, 32  # in the request: a tenth of a second, or a few of a bucket
_PUT_SECONDS = 900
_MAX_UPLOADS = 10_000  # per run
_MAX_UNUSED = 8  # of each machine of a run: a checkpoint that is being written, and the result with its exports
_WRITTEN = datetime.timedelta(seconds=4 * _PUT_SECONDS)  # after this, no file of a URL is still on its way
# Full training stores weights, gradients and two moments of each parameter in 32 bits, and some also in 16 bits.
_MAX_BYTES_A_PARAMETER, _BYTES_BESIDE = 20, 2**30


class UploadIncomplete(DomainError):
    """The object store lacks something that the manifest lists."""

    code = "upload_incomplete"


@transaction.atomic
def create_upload(*, lease: Lease, manifest: Manifest, manifest_sha256: str) -> UploadResponse:
    """Return signed PUT URLs for the files of the manifest; the same manifest gets the same locations."""
    run, job = lock_run(lease=lease)
    require_sealed(manifest, manifest_sha256)
    if (manifest.run_id, manifest.attempt) != (run.pk, run.attempt):
        raise InvalidValue("The manifest is of another run or attempt.", param="manifest.run_id")
    max_bytes = _BYTES_BESIDE + _MAX_BYTES_A_PARAMETER * job.base_model.parameter_count
    if sum(file.bytes for file in manifest.files) > max_bytes:
        raise InvalidValue("The files are larger than anything made of this base model.", param="manifest.files")
    if run.uploads.exclude(manifest_sha256=manifest_sha256).count() >= _MAX_UPLOADS:
        raise InvalidValue(f"A run has at most {_MAX_UPLOADS} uploads.", param="manifest")
    upload, is_new = RunUpload.objects.get_or_create(
        run=run,
        manifest_sha256=manifest_sha256,
        defaults={
            "organization_id": run.organization_id,
            "kind": manifest.kind,
            "manifest": msgspec.to_builtins(manifest),
            # The key contains the attempt and the content, so a zombie of an older attempt writes elsewhere.
            "object_prefix": object_key(
                run.organization_id, "runs", run.job_id, f"a{run.attempt}", manifest.kind, manifest_sha256[:32]
            ),
        },
    )
    if is_new:
        _require_few_unused(run, most=_MAX_UNUSED * job.node_count)
    return sign_places(upload, manifest)


def _require_few_unused(run: Run, *, most: int) -> None:
    """Delete the oldest uploads that no checkpoint refers to. Raises InvalidValue if files may still come for them."""
    unused = run.uploads.exclude(Exists(Checkpoint.objects.filter(upload=OuterRef("pk"))))
    for upload in unused.order_by("-created_at", "-pk")[most:]:
        if upload.created_at > db_now() - _WRITTEN:
            text = f"The run has {most} uploads that no checkpoint uses. Report them first."
            raise InvalidValue(text, param="manifest")
        delete_upload(upload)


def sign_places(upload: RunUpload | Conversion, manifest: Manifest) -> UploadResponse:
    """Return a PUT URL for each file of the manifest and for the manifest itself; of a large file also for each part.

    The parts of verified files are deleted, so these get no URL.
    """
    prefix = upload.object_prefix
    sizes = {file.name: file.bytes for file in manifest.files} | {MANIFEST_NAME: len(msgspec.json.encode(manifest))}
    large = [file for file in manifest.files if _is_in_parts(file)]
    return UploadResponse(
        upload_id=upload.pk,
        files={name: _sign_put(f"{prefix}/{name}", size) for name, size in sizes.items()},
        parts={file.name: _sign_parts(prefix, file) if upload.verified_at is None else () for file in large},
        part_bytes=PART_BYTES,
    )


def _sign_parts(prefix: str, file: ManifestFile) -> tuple[str, ...]:
    return tuple(_sign_put(key, size) for key, size in _parts_of(prefix, file))


def _sign_put(key: str, content_bytes: int) -> str:
    return store().signed_url(
        key,
        "PUT",
        expires_seconds=_PUT_SECONDS,
        base="internal",
        content_bytes=content_bytes,
        is_once=True,  # a verified file cannot be overwritten while the URL is valid
    )


def _is_in_parts(file: ManifestFile) -> bool:
    return file.bytes > PART_BYTES


def _parts_of(prefix: str, file: ManifestFile) -> Iterator[tuple[str, int]]:
    """Yield key and size of each part of a large file."""
    for number, start in enumerate(range(0, file.bytes, PART_BYTES), start=1):
        yield f"{prefix}/{_PARTS}/{file.name}/{number:05d}", min(PART_BYTES, file.bytes - start)


def require_sealed(manifest: Manifest, manifest_sha256: str) -> None:
    """Raise InvalidValue for a manifest with another hash, or with files that no worker may leave."""
    if hashlib.sha256(msgspec.json.encode(manifest)).hexdigest() != manifest_sha256:
        raise InvalidValue("manifest_sha256 is not the hash of the manifest's own encoding", param="manifest_sha256")
    if manifest.kind not in ("checkpoint", "adapter", "model"):
        raise InvalidValue("kind must be checkpoint, adapter or model", param="manifest.kind")
    if problem := problem_of(manifest):
        raise InvalidValue(problem, param="manifest.files")


def find_upload(run: Run, upload_id: str, *, kind: str) -> RunUpload:
    """Return the run's upload of this kind. Raises InvalidValue."""
    found = RunUpload.objects.filter(pk=upload_id, run=run, kind=kind).first()
    if found is None:
        raise InvalidValue(f"No upload of this run with the kind {kind} has this id.", param="upload_id")
    return found


class ReadAtOnce:
    """What one request still reads itself. The rest is read in threads of its own."""

    def __init__(self) -> None:
        self._bytes, self._files = READ_AT_ONCE_BYTES, READ_AT_ONCE_FILES

    def takes(self, *, byte_count: int, file_count: int) -> bool:
        """Return whether this is little enough, and count it then."""
        if byte_count > self._bytes or file_count > self._files:
            return False
        self._bytes -= byte_count
        self._files -= file_count
        return True


def verify_uploads(lease: Lease, upload_ids: Collection[str]) -> None:
    """Have uploads of the lease read, each once.

    Raises UploadIncomplete, and FilesUnread while many or large files are read.
    """
    if not upload_ids:
        return
    uploads = RunUpload.objects.filter(run__lease_id=lease.id, run__lease_token_sha256=sha256_hex(lease.token))
    at_once = ReadAtOnce()
    for upload in uploads.filter(pk__in=upload_ids, verified_at=None).select_related("run").order_by("pk"):
        run, owner = Run.objects.filter(pk=upload.run_id), str(upload.run.worker_id)
        try:
            require_contents(upload=upload, manifest_sha256=upload.manifest_sha256, owner=owner, at_once=at_once)
        except FilesUnread:
            if not readings.has_failed(upload.object_prefix):
                run.update(idle_ms=0)  # the worker waits for us: its run has not stalled
            raise
        run.update(idle_ms=0)
        record_verified(upload, RunUpload.objects.filter(pk=upload.pk))


def require_contents(
    *, upload: RunUpload | Conversion, manifest_sha256: str, owner: str, at_once: ReadAtOnce | None = None
) -> None:
    """Raise UploadIncomplete unless every file has the content that the manifest promises; a checkpoint's, the size.

    Large files are joined from their parts first.
    Many or large files are read in threads of their own, one upload of the worker `owner` at a time: FilesUnread until
    then. Call it outside of transactions.
    """
    manifest = _promised(upload, manifest_sha256)
    # The run that resumes from a checkpoint hashes its files again; files for customers are hashed here.
    is_hashed = upload.kind != "checkpoint"
    read = partial(_read_all, upload.object_prefix, manifest, is_hashed=is_hashed)
    size = sum(file.bytes for file in manifest.files if is_hashed or _is_in_parts(file))
    if (at_once or ReadAtOnce()).takes(byte_count=size, file_count=len(manifest.files)):
        read()
    else:
        readings.require(upload.object_prefix, read, owner=owner)


@transaction.atomic
def record_verified(upload: RunUpload | Conversion, rows: QuerySet[RunUpload] | QuerySet[Conversion]) -> None:
    """Record in `rows` that the upload's files were read, and have the parts of large files deleted.

    No parts are signed from now on. They stay while their last URLs are valid: no URL replaces one while another
    process still joins them, or writes one again after its deletion.
    """
    now = db_now()
    rows.update(verified_at=now)
    if any(_is_in_parts(file) for file in msgspec.convert(upload.manifest, Manifest).files):
        folder = f"{upload.object_prefix}/{_PARTS}"
        outbox.publish(
            topic="objects.delete",
            key=f"delete:{folder}",
            payload={"prefix": folder},
            organization=upload.organization_id,
            not_before=now + _WRITTEN,
        )


def require_complete(*, upload: RunUpload | Conversion, manifest_sha256: str) -> None:
    """Raise UploadIncomplete unless the files were read and the stored manifest is right."""
    _promised(upload, manifest_sha256)
    if upload.verified_at is None:  # no URL replaces a file that was read
        raise UploadIncomplete("The files were not read yet.")
    try:
        body = read_object(f"{upload.object_prefix}/{MANIFEST_NAME}")
    except ObjectMissing as missing:
        raise UploadIncomplete("The manifest was not uploaded.") from missing
    if hashlib.sha256(body).hexdigest() != manifest_sha256:
        raise UploadIncomplete("The stored manifest differs from the one promised.")


def _promised(upload: RunUpload | Conversion, manifest_sha256: str) -> Manifest:
    if upload.manifest_sha256 != manifest_sha256:
        raise UploadIncomplete("The manifest is not the one this upload was opened for.")
    return msgspec.convert(upload.manifest, Manifest)


def _read_all(prefix: str, manifest: Manifest, *, is_hashed: bool) -> None:
    try:
        for file in manifest.files:
            if _is_in_parts(file):
                _join(prefix, file)
            if store().stat(f"{prefix}/{file.name}").bytes != file.bytes:
                raise UploadIncomplete(f"{file.name} has another size than the manifest says.")
            if is_hashed and hash_object(f"{prefix}/{file.name}").sha256 != file.sha256:
                raise UploadIncomplete(f"{file.name} has another content than the manifest says.")
    except ObjectMissing as missing:
        raise UploadIncomplete("A file of the manifest was not uploaded.") from missing


def _join(prefix: str, file: ManifestFile) -> None:
    """Write a large file from its parts, unless it exists. Raises ObjectMissing."""
    key = f"{prefix}/{file.name}"
    try:
        store().stat(key)
    except ObjectMissing:
        store().join_parts(key, [part for part, _ in _parts_of(prefix, file)])
