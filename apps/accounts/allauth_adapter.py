"""How allauth's sign-up, login and password pages behave here."""

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from django.conf import settings
from django.db import transaction
from django.http import HttpRequest

from apps.accounts.models import User
from apps.core import outbox
from apps.core.ids import new_id


class AccountAdapter(DefaultAccountAdapter):
    """Mail goes through the outbox; addresses are kept in lower case."""

    def clean_email(self, email: str) -> str:
        return super().clean_email(email).lower()

    def format_email_subject(self, subject: str) -> str:
        return subject

    def send_password_reset_mail(self, user: User, email: str, context: dict[str, Any]) -> None:
        """Queue the mail without its token, which is made when the mail is sent."""
        self._queue({"kind": "password_reset", "user_id": user.pk, "email": email})

    def send_confirmation_mail(self, request: HttpRequest, emailconfirmation: Any, signup: bool) -> None:
        """Queue the mail without its link, which is made when the mail is sent."""
        self._queue({"kind": "email_confirmation", "address_id": emailconfirmation.email_address.pk})

    def send_mail(self, template_prefix: str, email: str, context: dict[str, Any]) -> None:
        site = {"name": "Anneal", "domain": settings.PUBLIC_URL}
        message = self.render_mail(template_prefix, email, {"email": email, "current_site": site, **context})
        self._queue({"kind": "plain", "to": email, "subject": message.subject, "body": message.body})

    def _queue(self, payload: dict[str, Any]) -> None:
        with transaction.atomic():
            outbox.publish(topic="mail", key=new_id("mail"), payload=payload)
