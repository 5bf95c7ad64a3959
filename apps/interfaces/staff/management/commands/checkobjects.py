"""`manage.py checkobjects`: compare the object store with the rows that name its objects."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from apps.core.database.clock import db_now
from apps.core.objects.store import store
from apps.interfaces.staff.management.object_check import compare_objects


class Command(BaseCommand):
    help = "List objects that rows name and that are missing, and objects older than a day that no row names."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--delete-orphans", action="store_true", help="delete the objects that no row names")

    def handle(self, *args: Any, **options: Any) -> None:
        found = compare_objects(now=db_now())
        for missing in found.missing:
            self.stdout.write(f"missing {missing.key} of {missing.row_id}")
        for key in found.orphans:
            if options["delete_orphans"]:
                store().delete(key)
            self.stdout.write(f"{'deleted' if options['delete_orphans'] else 'orphan'} {key}")
        counts = f"Of {found.checked} objects, {len(found.missing)} are missing. Orphans: {len(found.orphans)}."
        self.stdout.write(counts)
        if found.missing:
            raise CommandError("Copy the missing objects from an older backup, if there is one.")
