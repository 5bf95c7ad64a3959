"""`manage.py reseal`: seal every stored secret again, after ANNEAL_SECRET_KEY was replaced."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from apps.accounts.login.second_factor import reseal_second_factors
from apps.core.secrets.resealing import reseal_columns
from apps.core.secrets.sealing import SealBroken


class Command(BaseCommand):
    help = "Seal every stored secret under ANNEAL_SECRET_KEY; then ANNEAL_SECRET_KEY_FALLBACKS may go."

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with transaction.atomic():
                count = reseal_columns() + reseal_second_factors()
        except SealBroken as error:
            raise CommandError(f"{error}: put the key it was sealed under into ANNEAL_SECRET_KEY_FALLBACKS.") from error
        self.stdout.write(f"{count} secrets were sealed anew.")
