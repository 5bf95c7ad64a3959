"""/api/v1/audit: the audit log of the key's organization."""

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response

from apps.accounts.roles import Permission
from apps.core import audit
from apps.core.audit_log import PAGE, as_object, export, list_entries, read_filter
from apps.core.objects.store import attachment
from apps.interfaces.api.requests.pagination import read_limit
from apps.interfaces.api.views import ApiView

MAX_AT_ONCE = 100


class AuditLog(ApiView):
    required_scope = {"GET": Permission.AUDIT_READ}

    def get(self, request: Request) -> HttpResponseBase:
        """Return entries newest first.

        `actor`, `action`, `target`, `since` and `until` filter; `before` gets the next page. With `export` csv or
        jsonl, the answer is a file of up to 10,000 entries.
        """
        rows = list_entries(organization=self.organization, chosen=read_filter(request.query_params))
        if kind := request.query_params.get("export"):
            return self._file(export(rows, kind=kind), f"audit-{self.organization.slug}.{kind}")
        limit = read_limit(request, default=PAGE, maximum=MAX_AT_ONCE)
        found = list(rows[: limit + 1])
        data = [as_object(entry) for entry in found[:limit]]
        return Response(
            {
                "object": "list",
                "data": data,
                "has_more": len(found) > limit,
                "first_id": data[0]["id"] if data else None,
                "last_id": data[-1]["id"] if data else None,
            }
        )

    def _file(self, made: tuple[object, str], filename: str) -> HttpResponse:
        chunks, content_type = made
        audit.record(
            organization=self.organization, by=self.actor, action="audit.exported", target=self.organization.pk
        )
        headers = {"Content-Disposition": attachment(filename), "Cache-Control": "private, no-store"}
        return HttpResponse(chunks, content_type=content_type, headers=headers)
