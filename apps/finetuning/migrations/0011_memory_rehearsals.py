"""Add the memory of job shapes that workers rehearse on request."""

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("finetuning", "0010_firm_prices"),
    ]

    operations = [
        migrations.CreateModel(
            name="MemoryRehearsal",
            fields=[
                (
                    "digest",
                    models.CharField(
                        help_text="SHA-256 of the request and its version.",
                        max_length=64,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("request", models.JSONField(help_text="apps.contracts.runs.MemoryRequest")),
                (
                    "computed_bytes",
                    models.BigIntegerField(help_text="Of tensors, by the formula: a report far from it is refused."),
                ),
                (
                    "asker_sha256",
                    models.CharField(help_text="Of the organization's id, to count its open requests.", max_length=64),
                ),
                ("asked_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("taken_at", models.DateTimeField(null=True)),
                ("tries", models.PositiveSmallIntegerField(default=0)),
                ("report", models.JSONField(help_text="apps.contracts.runs.MemoryReport", null=True)),
                ("reported_at", models.DateTimeField(null=True)),
                (
                    "worker",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="finetuning.worker",
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(condition=models.Q(("reported_at", None)), fields=["asked_at"], name="rehearsal_open"),
                    models.Index(fields=["-asked_at"], name="rehearsal_newest"),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("report", None), ("reported_at", None)),
                            models.Q(("report__isnull", False), ("reported_at__isnull", False)),
                            _connector="OR",
                        ),
                        name="rehearsal_report_pair",
                    )
                ],
            },
        ),
    ]
