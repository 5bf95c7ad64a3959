"""/api/v1/models/{model}/licence: whether a base model's licence must be accepted, and its acceptance."""

from typing import Literal, TypedDict

import msgspec
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.catalog.licences import accept_licence, find_acceptance
from apps.catalog.models import BaseModel
from apps.catalog.queries import get_base_model
from apps.core.database.clock import db_now
from apps.interfaces.api.views import ApiView


class AcceptLicence(msgspec.Struct, forbid_unknown_fields=True):
    """`licence` repeats the name in the GET answer."""

    licence: str


class LicenceObject(TypedDict):
    object: Literal["model.licence"]
    model: str
    licence: str
    url: str | None
    must_be_accepted: bool
    accepted_at: int | None
    accepted_by: str | None


class ModelLicence(ApiView):
    """Acceptance counts for the whole organization and is stored with its actor and time."""

    required_scope = {"GET": Permission.VIEW, "POST": Permission.JOB_WRITE}
    examples = {"POST": {"licence": "Llama 3.1 Community License"}}

    def get(self, request: Request, model: str) -> LicenceObject:
        """Return the licence of a base model, and whether it is accepted."""
        return self._object(get_base_model(name=model))

    def post(self, request: Request, model: str, body: AcceptLicence) -> LicenceObject:
        """Accept the licence of a base model for the whole organization."""
        base_model = get_base_model(name=model)
        accept_licence(
            organization=self.organization, base_model=base_model, licence=body.licence, by=self.actor, now=db_now()
        )
        return self._object(base_model)

    def _object(self, base_model: BaseModel) -> LicenceObject:
        accepted = find_acceptance(organization=self.organization, base_model=base_model)
        return {
            "object": "model.licence",
            "model": base_model.name,
            "licence": base_model.licence,
            "url": base_model.licence_url or None,
            "must_be_accepted": base_model.demands_acceptance,
            "accepted_at": int(accepted.accepted_at.timestamp()) if accepted else None,
            "accepted_by": accepted.accepted_by if accepted else None,
        }
