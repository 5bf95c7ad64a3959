"""The kinds of addresses, what each line about one describes, and the ids that many have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from apps.accounts.roles import Permission as P  # noqa: N817 - one line per address

JOB = {"job_id": "job"}
ALIAS = {"alias_id": "alias"}
FILE = {"file_id": "dataset_version"}
UPLOAD = {"upload_id": "upload"}
BATCH = {"batch_id": "batch"}
PLAN = {"plan_id": "retraining_plan"}
WEBHOOK = {"webhook_id": "webhook"}
PROJECT = {"project_id": "project"}
PROJECT_MEMBER = PROJECT | {"member_id": "project_member"}
SERVICE_ACCOUNT = {"service_account_id": "service_account"}
NEW_WEBHOOK = {"url": "https://hooks.example.com/a", "event_types": ["batch.completed"]}
NEW_PLAN = {
    "name": "weekly", "schedule": "week-1", "hour_utc": "3", "min_gain_points": "0", "max_usd": "20",
    "criterion-0-kind": "string_check", "criterion-0-name": "exact", "criterion-0-operation": "eq",
    "criterion-0-input": "{{sample.output_text}}", "criterion-0-reference": "{{item.reference}}",
}  # fmt: skip

Kind = Literal["page", "person", "api", "staff", "public", "signed"]


@dataclass(frozen=True)
class Url:
    kind: Kind
    methods: Mapping[str, P | None] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    refs: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""


def page(*, get: P | None = None, post: P | None = None, **what: Any) -> Url:
    methods = {method: asked for method, asked in (("GET", get), ("POST", post)) if asked is not None}
    return Url("page", methods, **what)


def person(*methods: str, **what: Any) -> Url:
    return Url("person", dict.fromkeys(methods), **what)


def staff(*methods: str, **what: Any) -> Url:
    return Url("staff", dict.fromkeys(methods), **what)


def api(
    ids: Mapping[str, str] | None = None,
    data: Mapping[str, Any] | None = None,
    refs: Mapping[str, str] | None = None,
    **methods: P,
) -> Url:
    return Url("api", methods, ids=ids or {}, data=data or {}, refs=refs or {})


def public(reason: str, *methods: str, **what: Any) -> Url:
    return Url("public", dict.fromkeys(methods or ("GET",)), reason=reason, **what)


def signed(reason: str, *methods: str, **what: Any) -> Url:
    return Url("signed", dict.fromkeys(methods or ("GET",)), reason=reason, **what)
