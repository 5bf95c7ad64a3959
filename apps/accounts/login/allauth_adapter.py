"""The adapter for allauth's sign-up, login and password pages."""

from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.authentication import get_authentication_records
from allauth.account.models import EmailConfirmationHMAC
from django.conf import settings
from django.db import transaction
from django.http import HttpRequest

from apps.accounts.login.browser_tokens import revoke_browser_tokens
from apps.accounts.login.person_audit import ANONYMOUS, record_for_person
from apps.accounts.login.sessions import end_excess_sessions
from apps.accounts.models import User
from apps.core.database.clock import db_now
from apps.core.ids import new_id
from apps.core.messages import outbox
from apps.core.messages.translation import later


class AccountAdapter(DefaultAccountAdapter):
    """Sends mail through the outbox and keeps addresses in lower case."""

    error_messages = DefaultAccountAdapter.error_messages | {
        "email_password_mismatch": later("That email and password don't match."),
        "incorrect_password": later("That password is not right."),
        "enter_current_password": later("That is not your current password."),
    }

    def clean_email(self, email: str) -> str:
        return super().clean_email(email).lower()

    def format_email_subject(self, subject: str) -> str:
        return subject

    def login(self, request: HttpRequest, user: User) -> None:
        """Open the session and record how the person signed in."""
        end_excess_sessions(user=user)
        super().login(request, user)
        methods = [record.get("type") or record["method"] for record in get_authentication_records(request, user)]
        record_for_person(user=user, action="person.sign_in", methods=methods)

    def logout(self, request: HttpRequest) -> None:
        user = request.user
        super().logout(request)
        if isinstance(user, User):
            revoke_browser_tokens(user=user, now=db_now())
            record_for_person(user=user, action="person.sign_out")

    def authentication_failed(self, request: HttpRequest, **credentials: object) -> None:
        """Record the attempt. The typed address is kept only if it belongs to an account."""
        user = User.objects.filter(email=str(credentials.get("email", "")).strip().lower()).first()
        record_for_person(user=user, action="person.sign_in_failed", by=ANONYMOUS)

    def queue_password_reset(self, *, user: User | None, email: str) -> None:
        """Queue the mail without its token, which is made on sending. Without an account, no mail is sent."""
        self._queue({"kind": "password_reset", "user_id": user.pk if user else "", "email": email})

    def send_account_already_exists_mail(self, email: str) -> None:
        """Queue the mail to a person who signs up with the address of an account."""
        self._queue({"kind": "account_exists", "email": email})

    def send_confirmation_mail(
        self, request: HttpRequest, emailconfirmation: EmailConfirmationHMAC, signup: bool
    ) -> None:
        """Queue the mail without its link, which is made on sending."""
        self._queue({"kind": "email_confirmation", "address_id": emailconfirmation.email_address.pk})

    def send_mail(self, template_prefix: str, email: str, context: dict[str, object]) -> None:
        site = {"name": settings.BRAND_NAME, "domain": settings.PUBLIC_URL}
        message = self.render_mail(template_prefix, email, {"email": email, "current_site": site, **context})
        self._queue({"kind": "plain", "to": email, "subject": message.subject, "body": message.body})

    def _queue(self, payload: dict[str, object]) -> None:
        with transaction.atomic():
            outbox.publish(topic="mail", key=new_id("mail"), payload=payload)
