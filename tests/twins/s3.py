"""A bucket: moto's imitation of S3 on loopback."""

from collections.abc import Iterator
from contextlib import contextmanager

import boto3
from moto.server import ThreadedMotoServer

REGION = "eu-central-1"


@contextmanager
def serve_s3(bucket: str, prefix: str = "") -> Iterator[str]:
    """Yield the address of an empty bucket, as `ANNEAL_OBJECT_STORE` has it; any credentials open it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    credentials = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": REGION}
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", **credentials).create_bucket(
        Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION}
    )
    yield f"s3://{bucket}{prefix}?endpoint=http://{host}:{port}&region={REGION}"
    server.stop()
