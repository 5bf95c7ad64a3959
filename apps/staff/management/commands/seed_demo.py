"""Prepare the demonstration: organization, member, API key, credit, pools and worker tokens."""

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from apps.core.clock import db_now
from apps.staff.demo import seed_demo


class Command(BaseCommand):
    help = "Make what is missing of the demonstration; how to sign in is written to demo.json in ANNEAL_HOME."

    def handle(self, *args: Any, **options: Any) -> None:
        seeded = seed_demo(home=settings.HOME, now=db_now())
        self.stdout.write(str(settings.HOME / "demo.json") + (" (new)" if seeded.is_new else ""))
