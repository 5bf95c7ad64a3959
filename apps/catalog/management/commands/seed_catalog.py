"""Fill a new installation's catalogue; safe to run again."""

from typing import Any

from django.core.management.base import BaseCommand

from apps.catalog.seeding import seed_catalog
from apps.core.clock import db_now


class Command(BaseCommand):
    help = "Add the GPU types, base models and first prices that are missing, and install the demo's base model."

    def handle(self, *args: Any, **options: Any) -> None:
        seeded = seed_catalog(by="system", now=db_now())
        self.stdout.write(
            f"GPU types: {seeded.gpu_types} new; base models: {seeded.base_models} new; prices: {seeded.prices} new; "
            f"demo model: {seeded.demo_model}"
        )
