"""`manage.py endleases`: after a restore, take all runs from their workers."""

from typing import Any

from django.core.management.base import BaseCommand

from apps.finetuning.runs.leases import end_leases


class Command(BaseCommand):
    help = "End every lease of a run, so that it resumes from its last checkpoint. Run it after a restore."

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(f"{end_leases()} runs were queued again.")
