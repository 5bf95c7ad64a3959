"""Mail, sent from the outbox. A mail server that is down delays messages, but never a request.

A payload names the kind of message (`kind`) and its recipient by id. Links with a secret are made here, just before
sending, so that no table holds a secret.
"""

import re
from collections.abc import Callable, Mapping

from allauth.account import app_settings as allauth_settings
from allauth.account.models import EmailAddress, EmailConfirmationHMAC
from django.conf import settings
from django.core.mail import EmailMessage
from django.urls import reverse
from django.utils.translation import override

from apps.accounts.members.invitations import invitation_token
from apps.accounts.models import Invitation, User
from apps.core.messages.mail import render_mail, send_mail, write_mail
from apps.core.messages.translation import translated

Payload = Mapping[str, str]
_NAME_LENGTH = 60


def send(*, kind: str, **payload: str) -> None:
    """Write and send one message. Raises KeyError for an unknown kind."""
    message = _KINDS[kind](payload)
    if message is not None:
        send_mail(message)


def _invitation(payload: Payload) -> EmailMessage | None:
    """Return the mail to the invited person; return None if the invitation was withdrawn or accepted meanwhile."""
    rows = Invitation.objects.filter(pk=payload["invitation_id"], revoked_at=None, accepted_at=None)
    invitation = rows.select_related("organization", "invited_by").first()
    if invitation is None:
        return None
    link = _link("web:invitation_accept", token=invitation_token(invitation.pk))
    sender = invitation.invited_by
    return render_mail(
        "invitation",
        to=[invitation.email],
        language=sender.language,
        invitation=invitation,
        link=link,
        organization=plain_name(invitation.organization.name),
        sender=plain_name(sender.name) or sender.email,
    )


def _password_reset(payload: Payload) -> EmailMessage | None:
    user = User.objects.filter(pk=payload["user_id"], is_active=True, service_account_of=None).first()
    if user is None:
        return None
    token = allauth_settings.PASSWORD_RESET_TOKEN_GENERATOR().make_token(user)
    link = _link("account_reset_password_from_key", uidb36=user.pk, key=token)
    return render_mail("password_reset", to=[payload["email"]], language=user.language, user=user, link=link)


def _account_exists(payload: Payload) -> EmailMessage:
    links = {"sign_in": _link("account_login"), "reset": _link("account_reset_password")}
    email = payload["email"]
    language = User.objects.filter(email=email).values_list("language", flat=True).first() or ""
    return render_mail("account_exists", to=[email], language=language, email=email, **links)


def _email_confirmation(payload: Payload) -> EmailMessage | None:
    address = EmailAddress.objects.filter(pk=payload["address_id"], verified=False).select_related("user").first()
    if address is None:
        return None
    link = _link("account_confirm_email", key=EmailConfirmationHMAC(address).key)
    return render_mail(
        "email_confirmation", to=[address.email], language=address.user.language, address=address, link=link
    )


def _plain(payload: Payload) -> EmailMessage:
    """Return a message with the caller's text, which must hold no secret."""
    language = User.objects.filter(email=payload["to"]).values_list("language", flat=True).first()
    return _translated_mail(payload, to=payload["to"], language=language or "")


def _person(payload: Payload) -> EmailMessage | None:
    """Return a message with the caller's text to the current address of a person."""
    user = User.objects.filter(pk=payload["user_id"], is_active=True).first()
    return None if user is None else _translated_mail(payload, to=user.email, language=user.language)


def _translated_mail(payload: Payload, *, to: str, language: str) -> EmailMessage:
    """Return a message with the caller's English text in another language, as far as the catalogue has its lines."""
    with override(language or settings.LANGUAGE_CODE):
        body = "\n".join(translated(line) for line in payload["body"].split("\n"))
        return write_mail(translated(payload["subject"]), body, to=[to])


def _operators(payload: Payload) -> EmailMessage | None:
    """Return a message with the caller's text to every operator."""
    operators = User.objects.filter(is_operator=True, is_active=True).order_by("email")
    addresses = list(operators.values_list("email", flat=True))
    if not addresses:
        return None
    return write_mail(payload["subject"], payload["body"], to=addresses)


def plain_name(name: str) -> str:
    """Return a name that is safe in mail to a stranger: one short line in which no mail program finds a link."""
    words = re.sub(r"[^\w\s.,'’&()+-]", " ", name)
    words = re.sub(r"\.(?=\S)", " ", words)  # the dots of host names, not those of abbreviations
    return " ".join(words.split()).lstrip(" .,'+-")[:_NAME_LENGTH].strip()


def _link(name: str, **arguments: str) -> str:
    return settings.PUBLIC_URL + reverse(name, kwargs=arguments)


_KINDS: dict[str, Callable[[Payload], EmailMessage | None]] = {
    "invitation": _invitation,
    "password_reset": _password_reset,
    "account_exists": _account_exists,
    "email_confirmation": _email_confirmation,
    "plain": _plain,
    "person": _person,
    "operators": _operators,
}
