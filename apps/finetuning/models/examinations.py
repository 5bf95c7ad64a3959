"""Models of the examinations of uploaded adapters."""

from django.db import models
from django.db.models import Q

from apps.adapters.models import AdapterVersion
from apps.core.database.tenancy import OrganizationModel
from apps.core.ids import IdField
from apps.finetuning.models.pools import Worker


class Examination(OrganizationModel):
    """The wish that a trainer computes the numbers for an uploaded adapter's certificate, before it is served.

    It is open until a trainer reports them, too many have tried, or it is too old.
    """

    id = IdField(prefix="exam")
    version = models.OneToOneField(AdapterVersion, on_delete=models.PROTECT, related_name="+")
    asked_at = models.DateTimeField()
    worker = models.ForeignKey(Worker, on_delete=models.SET_NULL, null=True, related_name="+")
    taken_at = models.DateTimeField(null=True)
    tries = models.PositiveSmallIntegerField(default=0)
    ended_at = models.DateTimeField(null=True)
    problem = models.CharField(max_length=300, blank=True, help_text="Why there are no numbers, once it has ended.")

    class Meta:
        indexes = [models.Index(fields=["asked_at"], condition=Q(ended_at=None), name="examination_open")]
