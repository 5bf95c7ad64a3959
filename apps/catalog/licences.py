"""Licences of base models that an organization must accept before training, and their acceptances.

Permissive licences need no acceptance. Community licences and terms of use bind everyone who trains or serves the
model.
"""

import datetime

from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.models import Organization, key_of
from apps.catalog.models import BaseModel, LicenceAcceptance
from apps.core import audit
from apps.core.errors import DomainError, InvalidValue


class LicenceNotAccepted(DomainError):
    """The model's licence binds its users, and no member has accepted it for this organization."""

    code = "licence_not_accepted"


def find_acceptance(*, organization: Organization | str, base_model: BaseModel) -> LicenceAcceptance | None:
    """Return the acceptance of the licence with its current name. A changed licence must be accepted again."""
    accepted = LicenceAcceptance.objects.for_organization(organization)
    return accepted.filter(base_model=base_model, licence=base_model.licence).first()


def is_licence_missing(*, organization: Organization | str, base_model: BaseModel) -> bool:
    """Return whether a member of the organization must accept the licence before a job starts."""
    if not base_model.demands_acceptance:
        return False
    return find_acceptance(organization=organization, base_model=base_model) is None


def require_licence(*, organization: Organization | str, base_model: BaseModel) -> None:
    """Raise LicenceNotAccepted if the licence must be accepted and was not."""
    if is_licence_missing(organization=organization, base_model=base_model):
        raise LicenceNotAccepted(
            gettext(
                "%(display_name)s is under %(licence)s, which your organization has not accepted. Read it at "
                "%(licence_url)s, then accept it on the review step of a new job or with POST "
                "/api/v1/models/%(name)s/licence."
            )
            % {
                "display_name": base_model.display_name,
                "licence": repr(base_model.licence),
                "licence_url": base_model.licence_url,
                "name": base_model.name,
            },
            param="model",
        )


@transaction.atomic
def accept_licence(
    *, organization: Organization | str, base_model: BaseModel, licence: str, by: str, now: datetime.datetime
) -> LicenceAcceptance:
    """Accept the licence for the organization. `licence` repeats its name, as proof of which licence was read.

    Accepting again changes nothing. Raises InvalidValue if another licence is named or none needs acceptance.
    """
    if not base_model.demands_acceptance:
        raise InvalidValue(
            gettext("%(display_name)s has no licence that must be accepted.")
            % {"display_name": base_model.display_name},
            param="model",
        )
    if licence != base_model.licence:
        raise InvalidValue(
            gettext("The licence of %(display_name)s is %(licence)s.")
            % {"display_name": base_model.display_name, "licence": repr(base_model.licence)},
            param="licence",
        )
    accepted, is_new = LicenceAcceptance.objects.get_or_create(
        organization_id=key_of(organization),
        base_model=base_model,
        licence=licence,
        defaults={"accepted_by": by, "accepted_at": now},
    )
    if is_new:
        audit.record(organization=organization, by=by, action="licence.accepted", target=base_model.pk, licence=licence)
    return accepted
