"""Objects in an S3-compatible bucket."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import IO, Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError

from apps.core.objects.types import (
    CHUNK_BYTES,
    MULTIPART_BYTES,
    ONCE,
    Base,
    Keys,
    Method,
    NotDeleted,
    ObjectInfo,
    ObjectMissing,
    StoredObject,
    attachment,
    checked_key,
    checked_prefix,
    tapped,
)

SMALLEST_PART_BYTES = 5 * 1024 * 1024  # S3 refuses smaller ones, except the last
COPIED_BYTES = 2**30  # by one call, which answers only at its end
_COPIES_AT_ONCE = 4


class S3Store:
    """Objects in a bucket. Without `keys`, credentials come from boto3's own chain (environment, profile, role)."""

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint: str | None = None,
        public_endpoint: str | None = None,
        region: str | None = None,
        keys: Keys | None = None,
    ) -> None:
        self._bucket, self._prefix = bucket, prefix
        self._client = _s3_client(endpoint, region, keys)
        self._public_client = _s3_client(public_endpoint, region, keys) if public_endpoint else self._client

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        source = _HashedStream(chunks)
        # Parts are sent one after another, so memory holds at most two parts. A failure aborts the whole upload.
        transfer = TransferConfig(use_threads=False, multipart_chunksize=MULTIPART_BYTES)
        self._client.upload_fileobj(source, self._bucket, self._name(key), Config=transfer)
        return source.stored()

    def open_stream(self, key: str, *, offset: int = 0) -> IO[bytes]:
        wanted = {"Range": f"bytes={offset}-"} if offset else {}
        try:
            return self._client.get_object(Bucket=self._bucket, Key=self._name(key), **wanted)["Body"]
        except ClientError as error:
            raise _missing_or(error) from error

    def stat(self, key: str) -> ObjectInfo:
        try:
            found = self._client.head_object(Bucket=self._bucket, Key=self._name(key))
        except ClientError as error:
            raise _missing_or(error) from error
        return ObjectInfo(found["ContentLength"], found["LastModified"].timestamp())

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def delete_prefix(self, prefix: str) -> None:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._name(checked_prefix(prefix)) + "/"
        )
        for page in pages:
            found = [{"Key": item["Key"]} for item in page.get("Contents", [])]
            if found:
                done = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": found, "Quiet": True})
                if errors := done.get("Errors"):  # of single objects; the answer is 200 all the same
                    why = errors[0].get("Message") or errors[0].get("Code")
                    raise NotDeleted(f"{len(errors)} of {len(found)} objects were not deleted: {why}")

    def close_prefix(self, prefix: str) -> bool:
        checked_prefix(prefix)
        return False

    def list_objects(self, prefix: str) -> Iterator[tuple[str, ObjectInfo]]:
        name = self._name(prefix) + "/"
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=name):
            for item in page.get("Contents", []):
                key = item["Key"].removeprefix(f"{self._prefix}/") if self._prefix else item["Key"]
                yield key, ObjectInfo(item["Size"], item["LastModified"].timestamp())

    def compose(
        self, key: str, part_keys: Sequence[str], *, on_chunk: Callable[[bytes], None] = lambda _: None
    ) -> StoredObject:
        sizes = [self.stat(part).bytes for part in part_keys]
        if any(size < SMALLEST_PART_BYTES for size in sizes[:-1]) or not part_keys:
            return self.put_stream(key, tapped(self, part_keys, on_chunk))
        source = _HashedStream(tapped(self, part_keys, on_chunk))
        while source.read(CHUNK_BYTES):
            pass  # read for the hash; the copy below stays inside the bucket
        self._copy_parts(key, self._sources(part_keys, sizes))
        return source.stored()

    def join_parts(self, key: str, part_keys: Sequence[str]) -> None:
        sizes = [self.stat(part).bytes for part in part_keys]
        try:
            self._copy_parts(key, self._sources(part_keys, sizes), IfNoneMatch=ONCE["If-None-Match"])
        except ClientError as error:
            if _code_of(error) != "PreconditionFailed":  # else it is there already
                raise _missing_or(error) from error

    def _sources(self, keys: Sequence[str], sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield what each part of a copy reads: a small object, or a range of a large one."""
        for key, size in zip(keys, sizes, strict=True):
            source = {"CopySource": {"Bucket": self._bucket, "Key": self._name(key)}}
            if size <= COPIED_BYTES:
                yield source
                continue
            for start in range(0, size, COPIED_BYTES):
                yield source | {"CopySourceRange": f"bytes={start}-{min(start + COPIED_BYTES, size) - 1}"}

    def _copy_parts(self, key: str, sources: Iterable[dict[str, Any]], **condition: str) -> None:
        """Combine objects into one without moving their bytes out of the bucket."""
        target = {"Bucket": self._bucket, "Key": self._name(key)}
        target["UploadId"] = self._client.create_multipart_upload(**target)["UploadId"]

        def copy(number: int, source: dict[str, Any]) -> dict[str, Any]:
            copied = self._client.upload_part_copy(**target, **source, PartNumber=number)
            return {"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]}

        try:
            with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
                parts = list(pool.map(copy, count(1), sources))
            self._client.complete_multipart_upload(**target, **condition, MultipartUpload={"Parts": parts})
        except BaseException:
            self._client.abort_multipart_upload(**target)
            raise

    def signed_url(
        self,
        key: str,
        method: Method = "GET",
        *,
        expires_seconds: int,
        base: Base = "internal",
        filename: str | None = None,
        content_bytes: int | None = None,
        is_once: bool = False,
    ) -> str:
        parameters: dict[str, Any] = {"Bucket": self._bucket, "Key": self._name(key)}
        if method == "GET" and filename:
            parameters["ResponseContentDisposition"] = attachment(filename)
        if method == "PUT" and content_bytes is not None:
            parameters["ContentLength"] = content_bytes
        if method == "PUT" and is_once:
            parameters["IfNoneMatch"] = ONCE["If-None-Match"]
        client = self._public_client if base == "public" else self._client
        action = "get_object" if method == "GET" else "put_object"
        return client.generate_presigned_url(action, Params=parameters, ExpiresIn=expires_seconds)

    def _name(self, key: str) -> str:
        return "/".join(filter(None, [self._prefix, checked_key(key)]))


class _HashedStream:
    """A file object over chunks, from which boto3 reads. It hashes and counts the bytes."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""
        self._digest, self._size = hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        parts, wanted = [], size
        while wanted:
            piece = self._rest or next(self._chunks, b"")
            if not piece:
                break
            taken = piece if wanted < 0 else piece[:wanted]
            self._rest = piece[len(taken) :]
            parts.append(taken)
            wanted -= len(taken) if wanted > 0 else 0
        content = b"".join(parts)
        self._digest.update(content)
        self._size += len(content)
        return content

    def stored(self) -> StoredObject:
        return StoredObject(self._size, self._digest.hexdigest())


def _s3_client(endpoint: str | None, region: str | None, keys: Keys | None) -> Any:
    # A named endpoint gets path style, because such servers rarely have a DNS name for each bucket. Checksums are sent
    # only on request, because not every S3-compatible server accepts the newer default.
    config = Config(
        signature_version="s3v4",
        retries={"mode": "standard", "max_attempts": 4},
        s3={"addressing_style": "path" if endpoint else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    key_id, secret = keys or (None, None)
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=region or "us-east-1",
        config=config,
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
    )


def _missing_or(error: ClientError) -> Exception:
    return ObjectMissing("No such object.") if _code_of(error) in ("404", "NoSuchKey", "NotFound") else error


def _code_of(error: ClientError) -> str | None:
    return error.response.get("Error", {}).get("Code")
