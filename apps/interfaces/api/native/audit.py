"""/api/v1/audit: the audit log of the key's organization."""

from typing import Annotated, Literal

import msgspec
from django.http import HttpResponse
from msgspec import Meta
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.core import audit
from apps.core.audit_log import PAGE, AuditObject, as_object, export, list_entries, read_filter
from apps.core.database.read_times import counted_read
from apps.core.http.openapi.document import FileAnswer
from apps.core.objects.store import attachment
from apps.interfaces.api.requests.pagination import After, ListObject, list_object
from apps.interfaces.api.views import ApiView

Export = Annotated[HttpResponse, FileAnswer("text/csv")] | Annotated[HttpResponse, FileAnswer("application/jsonl")]
_A_TIME = "a date or time in UTC, such as `2026-01-31` or `2026-01-31T12:00:00Z`."


class AuditQuery(msgspec.Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = PAGE
    actor: str | None = None
    action: Annotated[str, Meta(description="One action. `key.` stands for all actions on keys.")] | None = None
    target: str | None = None
    since: Annotated[str, Meta(description=f"Entries from then on: {_A_TIME}")] | None = None
    until: Annotated[str, Meta(description=f"Entries before then: {_A_TIME}")] | None = None
    after: After | None = None
    export: Literal["csv", "jsonl"] | None = None


class AuditLog(ApiView):
    required_scope = {"GET": Permission.AUDIT_READ}

    def get(self, request: Request, query: AuditQuery) -> ListObject[AuditObject] | Export:
        """Return entries newest first.

        `actor`, `action`, `target`, `since` and `until` filter. With `export` csv or
        jsonl, the answer is a file of up to 10,000 entries.
        """
        rows = list_entries(organization=self.organization, chosen=read_filter(msgspec.structs.asdict(query)))
        if query.export:
            return self._file(export(rows, kind=query.export), f"audit-{self.organization.slug}.{query.export}")
        with counted_read():
            found = list(rows[: query.limit + 1])
        return list_object([as_object(entry) for entry in found[: query.limit]], has_more=len(found) > query.limit)

    def _file(self, made: tuple[object, str], filename: str) -> HttpResponse:
        chunks, content_type = made
        audit.record(
            organization=self.organization, by=self.actor, action="audit.exported", target=self.organization.pk
        )
        headers = {"Content-Disposition": attachment(filename), "Cache-Control": "private, no-store"}
        return HttpResponse(chunks, content_type=content_type, headers=headers)
