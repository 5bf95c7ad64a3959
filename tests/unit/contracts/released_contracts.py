"""The worker API as each release spoke it: its messages as JSON Schema, and whether two versions understand each other.

    python -m tests.unit.contracts.released_contracts VERSION

writes released/VERSION.json. Do this once for each release, and never change a file afterwards.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from apps.contracts import worker_api as wire
from apps.contracts.serving import DesiredState, ObservedState

FOLDER = Path(__file__).with_name("released")
SENT_BY_WORKERS = (
    wire.EnrollRequest, wire.ClaimRequest, wire.LeaveRequest, wire.HeartbeatRequest, wire.EventsRequest,
    wire.UploadRequest, wire.FinishRequest, wire.ProbeReport, wire.RehearsalReport, wire.ExaminationReport,
    wire.ConversionClaim, wire.ConversionReport, ObservedState,
)  # fmt: skip
SENT_TO_WORKERS = (
    wire.EnrollResponse, wire.ClaimResponse, wire.HeartbeatResponse, wire.EventsResponse, wire.UploadResponse,
    wire.JudgeAccess, wire.FinishResponse, wire.MissingProbes, wire.RehearsalRequest, wire.ExaminationRequest,
    wire.ConversionRequest, DesiredState,
)  # fmt: skip
Schema = Mapping[str, Any]
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def schemas_now() -> Schema:
    """Return the schema of each message and of each type inside, by its name."""
    messages = (*SENT_BY_WORKERS, *SENT_TO_WORKERS)
    schemas = msgspec.json.schema_components(messages, schema_hook=lambda _: {"title": "anything"})[1]
    return {
        name: {key: value for key, value in schema.items() if key not in ("title", "description")}
        for name, schema in schemas.items()
    }


def read_released() -> dict[str, Schema]:
    """Return the schemas of each release."""
    return {path.stem: msgspec.json.decode(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}


class Reading:
    """How code with the schemas `reader` reads what code with the schemas `writer` sends."""

    def __init__(self, *, reader: Schema, writer: Schema) -> None:
        self._reader, self._writer = reader, writer
        self._seen: set[tuple[str, str]] = set()

    def problems(self, name: str) -> list[str]:
        """Return what the reader would refuse in some message of this name; empty if it reads them all."""
        self._seen.clear()
        place = {"$ref": f"#/$defs/{name}"}
        return list(self._problems(place, place, name))

    def _problems(self, read: Schema, written: Schema, at: str) -> Iterator[str]:
        if "$ref" in read and "$ref" in written:
            pair = (read["$ref"], written["$ref"])
            if pair in self._seen:
                return
            self._seen.add(pair)
        read, written = _resolve(read, self._reader), _resolve(written, self._writer)
        if "anyOf" in written:
            for each in written["anyOf"]:
                yield from self._problems(read, each, at)
        elif "anyOf" in read:
            every = [list(self._problems(each, written, at)) for each in read["anyOf"]]
            if all(every):
                yield min(every, key=len)[0]
        else:
            yield from self._problems_of_one(read, written, at)

    def _problems_of_one(self, read: Schema, written: Schema, at: str) -> Iterator[str]:
        if "enum" in read:
            unknown = set(written.get("enum", ["any value"])) - set(read["enum"])
            yield from (f"{at} may be {value!r}" for value in sorted(unknown, key=str))
            return
        kinds = (read.get("type"), written.get("type"))
        if kinds[0] is not None and kinds[0] != kinds[1] and kinds != ("number", "integer"):
            yield f"{at} is {kinds[1]}, not {kinds[0]}"
            return
        for bound in _LEAST + _MOST:
            if bound in read and not _is_within(written.get(bound), read[bound], is_least=bound in _LEAST):
                yield f"{at} has another {bound}"
        for part in ("items", "additionalProperties"):
            if isinstance(read.get(part), Mapping):
                yield from self._problems(read[part], written.get(part, {}), f"{at}[]")
        properties, sent = read.get("properties", {}), written.get("properties", {})
        yield from (f"{at}.{name} is not sent" for name in read.get("required", ()) if name not in sent)
        for name in properties.keys() & sent.keys():
            yield from self._problems(properties[name], sent[name], f"{at}.{name}")


def _resolve(schema: Schema, schemas: Schema) -> Schema:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema


def _is_within(written: float | None, read: float, *, is_least: bool) -> bool:
    if written is None:
        return False
    return written >= read if is_least else written <= read


if __name__ == "__main__":
    content = msgspec.json.encode(schemas_now(), order="deterministic")
    (FOLDER / f"{sys.argv[1]}.json").write_bytes(msgspec.json.format(content, indent=1) + b"\n")
