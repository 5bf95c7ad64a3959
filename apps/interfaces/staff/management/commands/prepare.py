"""Prepare an installation to serve, in one process. Safe to run again."""

from argparse import ArgumentParser
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connection
from django.db.migrations.loader import MigrationLoader

from apps.catalog.seeding import seed_catalog
from apps.contracts.addresses.networks import is_loopback
from apps.core.database.clock import db_now
from apps.interfaces.staff.management.seeding import seed_account, seed_local_workers


class Command(BaseCommand):
    help = "Migrate the database and add what the catalogue misses. Run it as anneal_owner."
    requires_system_checks = []  # they import every page; `make check` runs them

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--local", action="store_true", help="also collect changed static files and make the pool of this machine"
        )
        parser.add_argument(
            "--demo", action="store_true", help="as --local, and make the demonstration's operator account"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["demo"]:
            _refuse_demo_for_others()
        _refuse_other_migrations()
        call_command("migrate", verbosity=options["verbosity"], stdout=self.stdout)
        seeded = seed_catalog(by="system", now=db_now())
        self.stdout.write(
            f"GPU types: {seeded.gpu_types} new; base models: {seeded.base_models} new; prices: {seeded.prices} new; "
            f"demo model: {seeded.demo_model}"
        )
        if options["demo"] or options["local"]:
            if not settings.DEBUG:
                _collect_static_files()
            seed_local_workers(home=settings.HOME, now=db_now())
        if options["demo"]:
            account = seed_account(home=settings.HOME, now=db_now())
            self.stdout.write(f"{settings.HOME / 'demo.json'}{' (new)' if account.is_new else ''}")


def _refuse_demo_for_others() -> None:
    """Raise CommandError if others can reach the pages, or the database is not the embedded one."""
    if not is_loopback(settings.PUBLIC_URL):
        raise CommandError(
            f"The demonstration's account is an operator's, and {settings.PUBLIC_URL} is reachable for others. Use "
            "--local, and `manage.py createoperator` for an account."
        )
    if not settings.DATABASES["default"]["HOST"].startswith("/"):
        raise CommandError("The demonstration's account is made in the embedded database only. Use --local.")


def _refuse_other_migrations() -> None:
    """Raise CommandError if the database has migrations of ours that this version lacks: its tables may differ."""
    ours = {app.label for app in apps.get_app_configs() if app.name.startswith("apps.")}
    loader = MigrationLoader(connection)
    other = sorted(set(loader.applied_migrations) - set(loader.disk_migrations))
    if named := [f"{label}.{name}" for label, name in other if label in ours]:
        raise CommandError(
            f"Another version made this database: it has {named[0]} and {len(named) - 1} more migrations that this "
            f"version lacks. Return to that version, or start with an empty database: delete {settings.HOME}, or drop "
            "the database if you run PostgreSQL yourself."
        )


def _collect_static_files() -> None:
    """Collect static files, which takes seconds, if one of them has changed."""
    manifest, stamp = settings.STATIC_ROOT / "staticfiles.json", settings.HOME / "static.stamp"
    # Not whether one is newer: a clock may step back, and an archive that was unpacked keeps the times of its files.
    found = [(path, path.stat()) for folder in settings.STATICFILES_DIRS for path in sorted(folder.rglob("*.*"))]
    current = "".join(f"{path} {status.st_size} {status.st_mtime_ns}\n" for path, status in found)
    if not manifest.exists() or not stamp.exists() or stamp.read_text() != current:
        call_command("collectstatic", interactive=False, verbosity=0)
        stamp.write_text(current)
