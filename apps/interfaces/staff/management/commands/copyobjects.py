"""`manage.py copyobjects`: copy the object store into a backup, or a backup into the object store."""

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from apps.core.objects.copies import copy_objects
from apps.core.objects.store import open_store, store


class Command(BaseCommand):
    help = "Copy new and changed objects between ANNEAL_OBJECT_STORE and another store. Deletes nothing."

    def add_arguments(self, parser: ArgumentParser) -> None:
        places = parser.add_mutually_exclusive_group(required=True)
        places.add_argument("--to", metavar="URL", help="back up to this store: file:///folder or s3://bucket/prefix")
        places.add_argument("--from", metavar="URL", dest="source", help="restore from this store")

    def handle(self, *args: Any, **options: Any) -> None:
        other = open_store(options["to"] or options["source"], keys=settings.BACKUP_KEYS)
        source, target = (store(), other) if options["to"] else (other, store())
        copied = copy_objects(source=source, target=target)
        self.stdout.write(f"{copied.objects} objects with {copied.bytes} bytes were copied.")
