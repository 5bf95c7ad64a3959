"""Calls of a trainer that makes a conversion."""

import hashlib

import msgspec

from apps.contracts.worker_api import (
    ConversionClaim,
    ConversionReport,
    ConversionRequest,
    UploadRequest,
    UploadResponse,
)
from apps.core.objects.store import store
from apps.finetuning.models import Conversion
from tests.factories.finetuning import manifest_of

PER_GB_NANO = 2 * 10**10  # the price of a conversion


def take(call) -> ConversionRequest:
    return msgspec.json.decode(call("/conversions/next", ConversionClaim()).content, type=ConversionRequest)


def stored(call, taken: ConversionRequest, files: dict[str, bytes], *, leave_out: str = "") -> str:
    """Store the files as the worker does; return the manifest's hash."""
    manifest = manifest_of("model", "run_1", 1, 10, files)
    body = msgspec.json.encode(manifest)
    digest = hashlib.sha256(body).hexdigest()
    answer = call(f"/conversions/{taken.id}/uploads", UploadRequest(manifest=manifest, manifest_sha256=digest))
    places = msgspec.json.decode(answer.content, type=UploadResponse)
    assert set(places.files) == {*files, "manifest.json"}
    prefix = Conversion.objects.get(pk=taken.id).object_prefix
    for name, content in [*files.items(), ("manifest.json", body)]:
        if name != leave_out:
            store().put_stream(f"{prefix}/{name}", [content])
    return digest


def finish(call, taken: ConversionRequest, **report) -> int:
    return call(f"/conversions/{taken.id}/finish", ConversionReport(**report)).status_code
