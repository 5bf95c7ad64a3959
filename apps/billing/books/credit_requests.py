"""Requests for credit: a member asks, operators get a mail, and the member gets the answer by mail.

The answer to a service account goes to the owners, because no person reads its mail.
"""

import datetime

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils.translation import gettext

from apps.accounts.models import Membership, Organization, User, key_of
from apps.accounts.notices.events import announce
from apps.billing.models import CREDIT_REQUEST_TRANSITIONS, CreditRequest, CreditRequestStatus
from apps.core import audit
from apps.core.database.clock import db_now
from apps.core.database.tenancy import OrganizationQuerySet, system
from apps.core.database.transitions import advance
from apps.core.errors import InvalidState, InvalidValue, NotFound, QuotaExceeded
from apps.core.messages import outbox
from apps.core.money import NANO_PER_USD, dollars

MAX_NANO = 100_000 * NANO_PER_USD
MAX_A_DAY = 3
MAX_MAILS_AN_HOUR = 20  # of all organizations together; anyone can sign up
_HOUR = datetime.timedelta(hours=1)
_DAY = datetime.timedelta(hours=24)


@transaction.atomic
def request_credit(*, organization: Organization, amount_nano: int, note: str, by: User) -> CreditRequest:
    """Ask the operators for credit; they get a mail, up to `MAX_MAILS_AN_HOUR`. The console lists every request.

    An organization has one open request at a time.

    Raises InvalidValue, InvalidState, QuotaExceeded.
    """
    if not 0 < amount_nano <= MAX_NANO:
        raise InvalidValue(
            gettext("Ask for an amount up to %(max_nano)s.") % {"max_nano": dollars(MAX_NANO)}, param="amount_usd"
        )
    made = CreditRequest.objects.for_organization(organization)
    if made.filter(requested_at__gt=db_now() - _DAY).count() >= MAX_A_DAY:
        raise QuotaExceeded(
            gettext("You can send %(max_a_day)s requests in 24 hours. Try again tomorrow.") % {"max_a_day": MAX_A_DAY},
            param="amount_usd",
        )
    try:
        with transaction.atomic():
            request = CreditRequest.objects.create(
                organization=organization, amount_nano=amount_nano, note=note.strip(), requested_by=by.pk
            )
    except IntegrityError as error:
        raise InvalidState(gettext("Your last request is still waiting for an answer."), param="amount_usd") from error
    audit.record(
        organization=organization, by=by.pk, action="credit.requested", target=request.pk, amount_nano=amount_nano
    )
    with system():  # operators get few mails an hour, however many the installation has requests
        requests = CreditRequest.objects.filter(requested_at__gt=db_now() - _HOUR).count()
    if requests > MAX_MAILS_AN_HOUR:
        return request
    body = f"{organization.name} asks for {dollars(amount_nano)} of credit. The request is by {by.email}.\n"
    if request.note:
        body += f"\n{request.note}\n"
    body += f"\nGrant or decline it: {settings.PUBLIC_URL}/staff/books\n"
    subject = f"A customer asks for {dollars(amount_nano)} of credit"  # a name could pretend to be something else
    _publish(request, {"kind": "operators", "subject": subject, "body": body})
    return request


@transaction.atomic
def decline_request(*, request_id: str, reason: str, by: str, now: datetime.datetime) -> CreditRequest:
    """Decline an open request with a reason that the customer reads. Raises InvalidValue, InvalidState."""
    if not reason.strip():
        raise InvalidValue(gettext("Give a reason: the customer reads it."), param="reason")
    request = CreditRequest.objects.select_for_update(of=("self",)).get(pk=request_id)
    if request.status != CreditRequestStatus.OPEN:
        raise InvalidState(gettext("The request was %(status)s already.") % {"status": request.status})
    return _answer(request, CreditRequestStatus.DECLINED, answer=reason.strip(), by=by, now=now)


def note_granted(
    *, organization: Organization | str, amount_nano: int, reason: str, by: str, now: datetime.datetime
) -> CreditRequest | None:
    """Answer the organization's open request, if there is one: an operator just gave it credit.

    Run it in the transaction of the posting.
    """
    opened = CreditRequest.objects.filter(organization_id=key_of(organization), status=CreditRequestStatus.OPEN)
    request = opened.select_for_update(of=("self",)).first()
    if request is None:
        return None
    granted = CreditRequestStatus.GRANTED
    return _answer(request, granted, answer=reason, by=by, now=now, granted_nano=amount_nano)


def list_requests(*, organization: Organization) -> OrganizationQuerySet:
    """Return the organization's requests, newest first."""
    return CreditRequest.objects.for_organization(organization).order_by("-requested_at", "-pk")


def get_request(*, organization: Organization, id: str) -> CreditRequest:
    """Return one of the organization's requests. Raises NotFound."""
    request: CreditRequest | None = list_requests(organization=organization).filter(pk=id).first()
    if request is None:
        raise NotFound(gettext("No such request for credit."), param="request_id")
    return request


def _answer(
    request: CreditRequest,
    status: CreditRequestStatus,
    *,
    answer: str,
    by: str,
    now: datetime.datetime,
    granted_nano: int | None = None,
) -> CreditRequest:
    advance(
        request,
        to=status,
        transitions=CREDIT_REQUEST_TRANSITIONS,
        answer=answer,
        granted_nano=granted_nano,
        decided_by=by,
        decided_at=now,
    )
    audit.record(organization=request.organization_id, by=by, action=f"credit.{status}", target=request.pk)
    asked = dollars(request.amount_nano)
    if granted_nano is None:
        subject, body = f"Your request for {asked} was declined", f"Reason: {answer}\n"
    else:
        subject = f"You have {dollars(granted_nano)} of new credit"
        body = f"You asked for {asked}, and {dollars(granted_nano)} was added to your balance.\n\n{answer}\n"
    readers = _readers(request)
    announce(
        organization=request.organization_id,
        type="credit.declined" if granted_nano is None else "credit.granted",
        subject=request.pk,
        title=lambda: subject,
        path="/credit",
        key=f"credit-request:{request.pk}",
        users=readers,
    )
    body += f"\nSee your credit: {settings.PUBLIC_URL}/credit\n"
    for user_id in readers:
        _publish(request, {"kind": "person", "user_id": user_id, "subject": subject, "body": body})
    return request


def _readers(request: CreditRequest) -> list[str]:
    """Return the ids of the people who get the answer."""
    if not User.objects.filter(pk=request.requested_by).exclude(service_account_of=None).exists():
        return [request.requested_by]
    owners = Membership.objects.people().filter(organization_id=request.organization_id, role="owner")
    return list(owners.values_list("user_id", flat=True))


def _publish(request: CreditRequest, payload: dict[str, object]) -> None:
    """Queue one mail about a request. Its recipients are looked up when it is sent."""
    key = f"credit-request:{request.pk}:{payload.get('user_id', payload['kind'])}"
    outbox.publish(topic="mail", key=key, payload=payload, organization=request.organization_id)
