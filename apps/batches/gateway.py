"""Requests of batches to the gateway, over the socket or the network that the front door uses."""

import http.client
import socket
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from django.conf import settings

from apps.batches.models import BatchRequest
from apps.batches.signatures import ANSWER_SECONDS, HEADER, sign
from apps.batches.validation import parse_line
from apps.core.ids import ulid_of
from apps.core.objects.store import store

_CONNECT_SECONDS = 10.0
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_TOO_LONG = b'{"error":{"code":"answer_too_long","message":"The answer is too long to be kept."}}'
TOO_SLOW_CODE = "request_timeout"
_TOO_SLOW = b'{"error":{"code":"%b","message":"The answer took too long."}}' % TOO_SLOW_CODE.encode()


class _UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.host)


@dataclass(frozen=True, kw_only=True)
class GatewayReply:
    """The status, request id and JSON body of the gateway's answer.

    The status is 0 if the gateway could not be reached.
    """

    status: int
    request_id: str = ""
    body: bytes = b"null"

    @property
    def error_code(self) -> str:
        """The `code` of an error object."""
        try:
            return msgspec.json.decode(self.body, type=_ErrorBody).error.code or ""
        except msgspec.DecodeError:
            return ""


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


def ask(*, request: BatchRequest, endpoint: str, input_key: str, secret: str, key_id: str) -> GatewayReply:
    """Send the request with the secret, and return the reply. If a key is given, the request counts under it.

    Raises ObjectMissing if the input file is gone.
    """
    with store().open_stream(input_key, offset=request.offset) as stream:
        line, _ = parse_line(stream.read(request.bytes), endpoint=endpoint)
    authorization = f"Bearer {secret}"
    ulid = ulid_of(request.pk)
    headers = {
        "Authorization": authorization,
        "Content-Type": "application/json",
        HEADER: sign(ulid, authorization=authorization, key_id=key_id),
        "X-Request-Id": f"req_{ulid}",
    }
    with closing(_connection()) as connection:
        try:
            connection.connect()
        except OSError:
            return GatewayReply(status=0)
        connection.sock.settimeout(ANSWER_SECONDS)
        try:
            connection.request("POST", endpoint, body=bytes(line.body), headers=headers)
            response = connection.getresponse()
            body = response.read(_MAX_ANSWER_BYTES + 1)
            if len(body) > _MAX_ANSWER_BYTES:
                return GatewayReply(status=400, body=_TOO_LONG)  # the next answer would be as long
            msgspec.json.decode(body)
            return GatewayReply(status=response.status, request_id=response.getheader("x-request-id", ""), body=body)
        except TimeoutError:
            return GatewayReply(status=504, body=_TOO_SLOW)
        except (OSError, http.client.HTTPException, msgspec.DecodeError):
            return GatewayReply(status=0)


def _connection() -> http.client.HTTPConnection:
    parts = urlsplit(settings.GATEWAY_URL)
    if parts.scheme == "unix":
        return _UnixConnection(parts.path, timeout=_CONNECT_SECONDS)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_CONNECT_SECONDS)
