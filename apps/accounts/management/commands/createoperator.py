"""Make the first operator of an installation, or give an existing person that right."""

from getpass import getpass
from typing import Any

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from apps.accounts.models import User
from apps.core import audit


class Command(BaseCommand):
    help = "Create an operator, or make the person with this e-mail address one. Reads the password from the terminal."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("email")
        parser.add_argument("--password-stdin", action="store_true", help="read the password from standard input")

    @transaction.atomic
    def handle(self, *args: Any, **options: Any) -> None:
        email = options["email"].strip().lower()
        user = User.objects.filter(email=email).first()
        if user is None:
            user = User.objects.create_user(email, _password(options["password_stdin"]), is_operator=True)
        else:
            user.is_operator = True
            user.save(update_fields=["is_operator"])
        audit.record(organization=None, by="system", action="operator.created", target=user.pk)
        self.stdout.write(f"{email} may open the operator console.")


def _password(from_stdin: bool) -> str:
    password = input() if from_stdin else getpass("Password: ")
    try:
        validate_password(password)
    except ValidationError as refused:
        raise CommandError(" ".join(refused.messages)) from refused
    return password
