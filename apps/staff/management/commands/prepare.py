"""Make an installation ready to serve, in one process; safe to run again."""

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand

from apps.catalog.seeding import seed_catalog
from apps.core.clock import db_now
from apps.staff.demo import seed_demo


class Command(BaseCommand):
    help = "Migrate the database and add what the catalogue misses. Run it as anneal_owner."
    requires_system_checks = []  # they import every page; `make check` runs them

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--demo", action="store_true", help="also collect changed static files and make the demonstration"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        call_command("migrate", verbosity=options["verbosity"], stdout=self.stdout)
        seeded = seed_catalog(by="system", now=db_now())
        self.stdout.write(
            f"GPU types: {seeded.gpu_types} new; base models: {seeded.base_models} new; prices: {seeded.prices} new; "
            f"demo model: {seeded.demo_model}"
        )
        if options["demo"]:
            if not settings.DEBUG and _are_static_files_changed():
                call_command("collectstatic", interactive=False, verbosity=0)
            account = seed_demo(home=settings.HOME, now=db_now())
            self.stdout.write(f"{settings.HOME / 'demo.json'}{' (new)' if account.is_new else ''}")


def _are_static_files_changed() -> bool:
    # Compressing them takes seconds; the manifest is written last.
    manifest = settings.STATIC_ROOT / "staticfiles.json"
    files = (path for folder in settings.STATICFILES_DIRS for path in folder.rglob("*.*"))
    return not manifest.exists() or manifest.stat().st_mtime_ns < max(path.stat().st_mtime_ns for path in files)
