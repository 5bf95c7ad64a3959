"""Create the first operator of an installation, or make an existing person one."""

from getpass import getpass

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from apps.accounts.login.addresses import has_verified_address, mark_verified
from apps.accounts.login.key_operations import revoke_keys_of
from apps.accounts.models import User
from apps.core import audit
from apps.core.database.clock import db_now


class Command(BaseCommand):
    help = (
        "Create an operator, or make the person with this e-mail address one. Reads the password of a new account from "
        "the terminal."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("email")
        parser.add_argument("--password-stdin", action="store_true", help="read the password from standard input")
        parser.add_argument(
            "--new-password",
            action="store_true",
            help="take over an existing account: set a new password, end its sessions and revoke its API keys",
        )

    @transaction.atomic
    def handle(self, *args: object, email: str, password_stdin: bool, new_password: bool, **options: object) -> None:
        email = email.strip().lower()
        user = User.objects.select_for_update(no_key=True).filter(email=email).first()
        if user is None:
            user = User.objects.create_user(email, _password(password_stdin))
            mark_verified(user=user)
        elif new_password:
            # Lock out everyone who could use the account so far; the new password ends all its sessions.
            password = _password(password_stdin)
            user.is_active = True
            user.set_password(password)
            user.save(update_fields=["is_active", "password"])
            revoke_keys_of(user=user, now=db_now())
            mark_verified(user=user)
        else:
            _require_known_owner(user)
        user.is_operator = True
        user.save(update_fields=["is_operator"])
        audit.record(organization=None, by="system", action="operator.created", target=user.pk)
        self.stdout.write(f"{email} may open the operator console.")


def _require_known_owner(user: User) -> None:
    """Raise CommandError unless the account is active and its owner has proven to receive mail at its address."""
    if not user.is_active:
        raise CommandError(f"The account {user.email} is closed.")
    if not has_verified_address(user=user, email=user.email):
        raise CommandError(
            f"An account with the address {user.email} exists, and the address was never verified: anyone could have "
            "created it. Verify the address first, or take the account over with --new-password."
        )


def _password(from_stdin: bool) -> str:
    password = input() if from_stdin else getpass("Password: ")
    try:
        validate_password(password)
    except ValidationError as refused:
        raise CommandError(" ".join(refused.messages)) from refused
    return password
