"""Regenerate docs/states.md."""

from pathlib import Path

from django.core.management.base import BaseCommand

from apps.finetuning.jobs.diagrams import render


class Command(BaseCommand):
    help = "Write docs/states.md from the tables of legal moves."

    def handle(self, *args: object, **options: object) -> None:
        (Path(__file__).resolve().parents[4] / "docs" / "states.md").write_text(render())
