"""Addresses and forms of pages that several tests open."""

import re

from django.urls import reverse

from apps.datasets.models import DatasetVersion
from apps.finetuning.models import FineTuningJob

WIZARD_URL = "/jobs/new"


def page_of(version: DatasetVersion, **query: object) -> str:
    address = reverse("web:dataset_detail", args=[version.pk])
    return address + "?" + "&".join(f"{name}={value}" for name, value in query.items())


def launch(client, review: str, *, but: FineTuningJob | None = None, **sent: str) -> FineTuningJob:
    """Send the form of a review; return the job that it made, of all but the named one."""
    form = re.search(r'<form id="wizard" method="post".*?</form>', review, re.DOTALL)[0]
    fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', form))
    del fields["csrfmiddlewaretoken"]
    assert client.post(WIZARD_URL, fields | sent).status_code == 302
    return FineTuningJob.objects.exclude(pk=but.pk if but else "").get()


def shown(page: str, name: str) -> str:
    """Return the value of the page's field."""
    return re.search(rf'name="{name}"[^>]* value="([^"]*)"', page)[1]
