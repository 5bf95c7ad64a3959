"""Models of datasets: immutable uploaded files, identified by their content."""

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from apps.core.database.structs import StructField
from apps.core.database.tenancy import OrganizationModel
from apps.core.database.transitions import choices_of, status_trigger
from apps.core.ids import IdField
from apps.datasets.lifecycle import UPLOAD_TRANSITIONS, VERSION_TRANSITIONS, DatasetVersionStatus, UploadStatus
from apps.datasets.problems import OF_THE_FILE
from apps.datasets.validation.layout import FileLayout


class Dataset(OrganizationModel):
    """A name under which versions of the same data are kept, in a project."""

    id = IdField(prefix="ds")
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, related_name="+")
    name = models.CharField(max_length=120)
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                "organization", "project", "name", condition=Q(deleted_at=None), name="dataset_name_once"
            )
        ]

    def __str__(self) -> str:
        return self.name


class DatasetVersion(OrganizationModel):
    """One uploaded file; it never changes once ready. Its id is the OpenAI file id."""

    id = IdField(prefix="file", separator="-")
    dataset = models.ForeignKey(Dataset, on_delete=models.PROTECT, related_name="versions")
    number = models.PositiveIntegerField()
    status = models.CharField(
        max_length=16, choices=choices_of(VERSION_TRANSITIONS), default=DatasetVersionStatus.UPLOADED
    )
    purpose = models.CharField(max_length=24, default="fine-tune")
    filename = models.CharField(max_length=255)
    object_key = models.CharField(max_length=300, help_text="The file as it was uploaded.")
    bytes = models.BigIntegerField()
    sha256 = models.CharField(max_length=64, help_text="Empty until a repaired version is written.")
    kind = models.CharField(max_length=16, default="", help_text="chat, preference or text; empty until known.")
    layout: "models.Field[FileLayout, FileLayout]" = StructField(
        FileLayout, help_text="What the file is: container, mapping, columns, first rows."
    )
    given_mapping = models.JSONField(null=True, help_text="Which column is what, where a person said so.")
    rows_key = models.CharField(max_length=300, default="", help_text="Its rows as JSONL, unless the file is that.")
    rows_bytes = models.BigIntegerField(default=0)
    rows_sha256 = models.CharField(max_length=64, default="")
    derived_from = models.ForeignKey("self", on_delete=models.PROTECT, null=True, related_name="derived")
    repair = models.CharField(max_length=8, default="", help_text="How the rows of `derived_from` become this file.")
    rows = models.BigIntegerField(null=True)
    error_count = models.BigIntegerField(default=0)
    errors = models.JSONField(default=list, help_text="First problems: line, code, message, param, fix.")
    line_offsets = models.JSONField(default=list, help_text="Where every LINES_PER_OFFSET-th line starts, for paging.")
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField(null=True)
    validation_lease_expires_at = models.DateTimeField(
        null=True, help_text="Renewed by the validating task. Expired means that the task died."
    )
    validation_attempts = models.PositiveSmallIntegerField(default=0, help_text="Also those that ended with a worker.")
    validated_at = models.DateTimeField(null=True)
    dismissed_at = models.DateTimeField(null=True, help_text="Since then its errors need no attention.")
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["dataset", "number"], name="dataset_version_once"),
            models.CheckConstraint(condition=Q(bytes__gte=0, error_count__gte=0), name="dataset_version_sizes"),
        ]
        indexes = [models.Index(fields=["organization", "-created_at", "-id"], name="dataset_version_newest")]
        triggers = [status_trigger("dataset_version_status", VERSION_TRANSITIONS)]

    @property
    def data_key(self) -> str:
        """The object with the rows as JSONL, which pages, counts and training read."""
        return self.rows_key or self.object_key

    @property
    def has_bad_rows(self) -> bool:
        """Whether the file was read as rows of which some are bad: those can be repaired or dropped."""
        return self.bad_row_count > 0

    @property
    def bad_row_count(self) -> int:
        """The number of bad rows; `errors` lists the first of them. Zero if the file was not read as rows."""
        if self.status != DatasetVersionStatus.INVALID or self.layout.is_rejected:
            return 0
        of_file = sum(error["code"] in OF_THE_FILE for error in self.errors)
        return self.error_count - of_file if of_file < len(self.errors) else 0

    @property
    def data_bytes(self) -> int:
        return self.rows_bytes if self.rows_key else self.bytes

    @property
    def data_sha256(self) -> str:
        return self.rows_sha256 if self.rows_key else self.sha256


class TokenCount(OrganizationModel):
    """Tokens of a version under one base model's tokenizer and chat template, counted once."""

    version = models.ForeignKey(DatasetVersion, on_delete=models.CASCADE, related_name="token_counts")
    base_model = models.ForeignKey("catalog.BaseModel", on_delete=models.PROTECT, related_name="+")
    chat_template_sha256 = models.CharField(max_length=64)
    tokens = models.BigIntegerField()
    trained_tokens = models.BigIntegerField()
    longest_row_tokens = models.PositiveIntegerField()
    histogram = models.JSONField(help_text="Ascending [upper bound in tokens, rows] pairs.")
    starts = models.JSONField(
        default=list,
        db_default=[],
        help_text="Ascending [from, to, rows], by the position of the rows' first trained token.",
    )
    cuts = models.JSONField(default=list, help_text="What each usual limit would cut: apps.datasets.token_counts.Cut.")
    refusal = models.JSONField(
        null=True,
        help_text="The first row that the model's template cannot render, as a LineError.",
    )
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["version", "base_model", "chat_template_sha256"], name="token_count_once")
        ]


class Upload(OrganizationModel):
    """A file arriving in parts. The parts are separate objects, assembled when the upload is completed."""

    id = IdField(prefix="upload")
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, related_name="+")
    status = models.CharField(max_length=16, choices=choices_of(UPLOAD_TRANSITIONS), default=UploadStatus.PENDING)
    purpose = models.CharField(max_length=24)
    filename = models.CharField(max_length=255)
    mime_type = models.CharField(max_length=120)
    bytes = models.BigIntegerField(help_text="What all parts have together.")
    part_bytes = models.PositiveIntegerField(null=True, help_text="The size of planned parts; null where none are.")
    dataset_name = models.CharField(max_length=120, default="")
    given_mapping = models.JSONField(null=True)
    file_expires_after_seconds = models.PositiveIntegerField(null=True)
    part_ids = models.JSONField(default=list, help_text="The parts it was completed with, in their order.")
    version = models.ForeignKey(DatasetVersion, on_delete=models.PROTECT, null=True, related_name="+")
    file_id = models.CharField(max_length=64, default="", help_text="The file it became, if that is no version.")
    signed_until = models.DateTimeField(
        null=True, help_text="Until then a client may hold a URL that takes a part; null once none can be used."
    )
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(bytes__gt=0), name="upload_size")]
        indexes = [
            models.Index(fields=["expires_at"], condition=Q(status=UploadStatus.PENDING), name="upload_pending"),
            models.Index(fields=["signed_until"], condition=Q(signed_until__isnull=False), name="upload_signed"),
        ]
        triggers = [status_trigger("upload_status", UPLOAD_TRANSITIONS)]


class UploadPart(OrganizationModel):
    """One part of an upload through the API, in any order."""

    id = IdField(prefix="part")
    upload = models.ForeignKey(Upload, on_delete=models.CASCADE, related_name="parts")
    bytes = models.BigIntegerField()
    created_at = models.DateTimeField(db_default=Now())


class VersionInspection(OrganizationModel):
    """The findings of one pass over a version's rows, which it does not change.

    Findings are copies, conflicts and hints at personal data.
    """

    version = models.OneToOneField(DatasetVersion, on_delete=models.CASCADE, related_name="inspection")
    rules = models.PositiveIntegerField(help_text="apps.datasets.inspection.inspector.INSPECTION_VERSION of the pass.")
    findings = models.JSONField(help_text="apps.datasets.inspection.inspector.Finding, the first rows of each with it.")
    distinct_rows = models.BigIntegerField()
    identities_key = models.CharField(max_length=300, help_text="Eight bytes for each row: what decides its split.")
    line_steps = models.BinaryField(
        db_default=b"",
        help_text="Four bytes for each row, as zlib: how many lines it is after the one before. Empty: one each.",
    )
    created_at = models.DateTimeField(db_default=Now())


class VersionComparison(OrganizationModel):
    """The rows of a version that repeat a row of its validation file, and so are not trained on."""

    version = models.ForeignKey(DatasetVersion, on_delete=models.CASCADE, related_name="comparisons")
    other = models.ForeignKey(DatasetVersion, on_delete=models.CASCADE, related_name="+")
    rules = models.PositiveIntegerField(
        help_text="apps.datasets.inspection.comparisons.COMPARISON_VERSION it was made by."
    )
    equal_rows = models.BigIntegerField(help_text="Stand in the other version too, but for case and spacing.")
    near_rows = models.BigIntegerField(help_text="Nearly repeat one of it.")
    marks = models.BinaryField(help_text="A byte for each row, apps.contracts.splits.held_rows.Repeats, as zlib.")
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["version", "other"], name="compared_once")]

    @property
    def left_out_rows(self) -> int:
        return self.equal_rows + self.near_rows
