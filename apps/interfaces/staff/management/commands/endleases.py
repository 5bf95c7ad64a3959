"""`manage.py endleases`: after a restore, take all runs from their workers and tell replicas what to hold."""

from typing import Any

from django.core.management.base import BaseCommand

from apps.finetuning.runs.leases import end_leases
from apps.serving.operations import send_desired_states


class Command(BaseCommand):
    help = (
        "End every lease of a run, so that it resumes from its last checkpoint, and have replicas read again which "
        "adapters to hold. Run it after a restore."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        send_desired_states()
        self.stdout.write(f"{end_leases()} runs were queued again.")
